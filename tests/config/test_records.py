"""Dataclasses as JSON: there and back, and all problems of a document at once."""

from dataclasses import dataclass
from typing import Any

import pytest

from craftcli.config.records import read_record, record_to_json


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A record inside another."""

    joints: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Robot:
    """A record with every kind of field."""

    name: str
    arms: dict[str, Arm]
    mobile: bool = False
    serial: int | None = None


ROBOT = Robot(name="r2", arms={"left": Arm(joints=(1, 2))}, serial=7)
DOCUMENT = {"name": "r2", "arms": {"left": {"joints": [1, 2]}}, "mobile": False, "serial": 7}


def read(
    document: dict[str, Any], *, allow_unknown: bool = False
) -> tuple[Robot | None, list[str]]:
    problems: list[str] = []
    return read_record(Robot, document, problems, allow_unknown=allow_unknown), problems


def test_there_and_back() -> None:
    assert record_to_json(ROBOT)["serial"] == 7
    assert read(DOCUMENT) == (ROBOT, [])


def test_fields_with_a_default_may_be_missing() -> None:
    found, problems = read({"name": "r2", "arms": {}})
    assert (found, problems) == (Robot(name="r2", arms={}), [])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": 3}, ["field name is 3, not a string"]),
        ({"serial": True}, ["field serial is True, not an integer"]),
        ({"mobile": 1}, ["field mobile is 1, not true or false"]),
        ({"arms": {"left": {}}}, ["field arms.left.joints is missing"]),
        (
            {"arms": {"left": {"joints": [1, "x"]}}},
            ["field arms.left.joints[1] is 'x', not an integer"],
        ),
        ({"nam": "x"}, ["field nam is unknown (close to name)"]),
        (
            {"name": None, "arms": []},
            ["field name is None, not a string", "field arms is [], not an object"],
        ),
    ],
)
def test_all_problems_are_named_by_their_place(
    changes: dict[str, Any], expected: list[str]
) -> None:
    assert read({**DOCUMENT, **changes}) == (None, expected)


def test_unknown_fields_may_be_allowed() -> None:
    document = {**DOCUMENT, "new": 1, "arms": {"left": {"joints": [1, 2], "new": 1}}}
    assert read(document, allow_unknown=True) == (ROBOT, [])

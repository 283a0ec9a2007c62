"""Texts with a structure of their own: `--lora`, `--rename`, and choices joined by `+`."""

import pytest

from craftcli.choices import Mode
from craftcli.config.parsing import (
    LoraSpec,
    joined_problems,
    parse_lora,
    parse_renames,
    split_joined,
)
from craftcli.config.train import TrainConfig
from craftcli.errors import EXIT_USAGE, CraftError


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("r=4", LoraSpec(r=4, alpha=8)),
        ("alpha=3", LoraSpec(r=8, alpha=3)),
        (
            " r=8, alpha=16, targets=q_proj; v_proj",
            LoraSpec(r=8, alpha=16, targets=("q_proj", "v_proj")),
        ),
    ],
)
def test_parts_that_are_left_out_have_defaults(text: str, spec: LoraSpec) -> None:
    assert parse_lora(text) == spec
    assert TrainConfig(lora=text).lora_spec == spec


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has '', not one of r, alpha, targets"),
        ("rank=8", "has 'rank', not one of r, alpha, targets"),
        ("r=8,v_proj", "has 'v_proj', not one of r, alpha, targets"),
        ("r=8,r=4", "gives one of r, alpha, targets twice"),
        ("r=0", "has r=0, not a whole number above 0"),
        ("r=-1", "has r=-1, not a whole number above 0"),
        ("r=8.5", "has r=8.5, not a whole number above 0"),
        ("r=8,alpha=x", "has alpha=x, not a whole number above 0"),
        ("targets=", "has an empty name among its targets"),
        ("targets=q_proj;", "has an empty name among its targets"),
    ],
)
def test_a_text_without_a_meaning_is_refused_at_once(text: str, problem: str) -> None:
    with pytest.raises(CraftError) as caught:
        TrainConfig(lora=text)
    assert f"--lora {problem}" in caught.value.why or problem in caught.value.why
    assert caught.value.exit_code == EXIT_USAGE


def test_renames_are_pairs() -> None:
    assert parse_renames("a=b, c.d=e.f") == {"a": "b", "c.d": "e.f"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has '', not OLD=NEW"),
        ("a", "has 'a', not OLD=NEW"),
        ("a=", "has 'a=', not OLD=NEW"),
        ("a=b=c", "has 'a=b=c', not OLD=NEW"),
        ("a=b,a=c", "renames from a twice"),
        ("a=c,b=c", "renames to c twice"),
    ],
)
def test_renames_without_a_meaning_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_renames(text)


def test_joined_choices_come_in_the_order_of_their_class() -> None:
    assert split_joined("action+hidden", Mode) == (Mode.HIDDEN, Mode.ACTION)
    assert joined_problems("--mode", "action+hidden", Mode) == []
    assert joined_problems("--mode", "hidden+hidden", Mode) == [
        "--mode hidden+hidden names one twice"
    ]
    (problem,) = joined_problems("--mode", "hiden", Mode)
    assert problem.startswith("--mode has 'hiden', not one of hidden, ")

"""The commands that craft recommends, for caches of every kind."""

import dataclasses
from pathlib import Path

from made.manifests import DATASET, TEACHER, make_manifest

from craftcli.cli.next_steps import held_out_build, train_on
from craftcli.demo.defaults import DEMO_POLICY_TYPE

DEMO = dataclasses.replace(TEACHER, policy_type=DEMO_POLICY_TYPE)


def test_training_names_what_the_user_has_and_must_still_give() -> None:
    assert train_on(Path("anchors.zarr"), demo=True, policy="x") == "craft train"
    own = train_on(Path("my cache.zarr"), demo=False, policy="me/policy")
    assert own == "craft train --policy me/policy --dataset NEW_DATA --cache 'my cache.zarr'"


def test_held_out_anchors_ask_for_no_more_frames_than_there_are() -> None:
    few = held_out_build("a.zarr", make_manifest(teacher=DEMO))
    assert few == "craft cache build --exclude a.zarr --samples 90 --output held_out.zarr"
    own = held_out_build("a.zarr", make_manifest())
    assert own == (
        "craft cache build --policy a/b --dataset a/old --exclude a.zarr --samples 90 "
        "--output held_out.zarr"
    )
    assert held_out_build("a.zarr", make_manifest(rows=100)) is None


def test_held_out_anchors_are_not_written_over_the_cache_they_leave_out() -> None:
    again = held_out_build("caches/held_out.zarr", make_manifest(teacher=DEMO))
    assert again == (
        "craft cache build --exclude caches/held_out.zarr --samples 90 --output held_out-2.zarr"
    )


def test_frames_of_new_data_under_old_instructions_are_not_left_out() -> None:
    """`craft cache build` reads the old data, and such a cache holds no frame of them."""
    made = make_manifest(teacher=DEMO, prompts_digest="p", dataset=DATASET)
    assert held_out_build("a.zarr", made) == (
        "craft cache build --samples 128 --output held_out.zarr"
    )

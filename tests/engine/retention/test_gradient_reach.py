"""Autograd tells what retention holds and what stays free behind it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from craftcli.choices import Mode
from craftcli.config.train import TrainConfig
from craftcli.engine.retention.gradient_reach import (
    GradientReach,
    describe_downstream,
    describe_little,
    describe_share,
    find_reach,
    freeze,
    require_reach,
)
from craftcli.engine.retention.imitation import Imitation
from craftcli.engine.retention.retention import open_retention
from craftcli.errors import EXIT_CHECK_FAILED, CraftError
from craftcli.policies.lerobot.batches import read_rows

LANGUAGE = "model.paligemma_with_expert.paligemma.model.language_model."
HEAD = "model.paligemma_with_expert.paligemma.lm_head.weight"


def reach_of(student: Any, cache: Path, data: Any, mode: str = "hidden", **settings: Any) -> Any:
    config = TrainConfig(mode=mode, anchor_batch_size=4, **settings)
    retention = open_retention(config, student, cache)
    batch = student.preprocess(read_rows(data, [0, 1]))
    return find_reach(student.policy, student.adapter, retention.terms, batch)


def test_behind_the_last_layer_lie_the_norm_and_the_head(
    student: Any, cache: Path, new_data: Any
) -> None:
    reach = reach_of(student, cache, new_data)
    assert reach.downstream == {HEAD, LANGUAGE + "norm.weight"}
    assert reach.retained == reach.trainable - reach.downstream
    assert reach.free == reach.downstream
    assert describe_downstream(reach, frozen=False) == (
        "free to drift behind the deepest retained layer (8 %): lm_head.weight, norm.weight"
    )


def test_what_lies_behind_is_not_free_when_the_output_is_held_too(
    student: Any, cache: Path, new_data: Any
) -> None:
    reach = reach_of(student, cache, new_data, "hidden+action")
    assert reach.downstream == {HEAD, LANGUAGE + "norm.weight"}
    assert reach.free == frozenset()
    assert reach.retained == reach.trainable
    assert describe_downstream(reach, frozen=False).startswith("nothing trainable is free to drift")
    assert describe_downstream(reach, frozen=True) == (
        "frozen behind the deepest retained layer (8 %): lm_head.weight, norm.weight"
    )


def test_a_head_that_is_tied_to_what_is_held_is_free_all_the_same(
    student: Any, cache: Path, new_data: Any
) -> None:
    """The hidden states reach the embedding, and say nothing of what the head makes of them."""
    paligemma = student.policy.model.paligemma_with_expert.paligemma
    paligemma.lm_head.weight = paligemma.model.language_model.embed_tokens.weight
    alone = reach_of(student, cache, new_data, other_student=True)
    assert HEAD in alone.retained  # the name that both have now
    assert HEAD in alone.free
    both = reach_of(student, cache, new_data, "hidden+action", other_student=True)
    assert HEAD in both.downstream
    assert both.free == frozenset()


def test_behind_an_early_layer_lie_all_the_later_ones(
    student: Any, build: Any, new_data: Any, tmp_path: Path
) -> None:
    reach = reach_of(student, build(tmp_path / "a.zarr", layers="1", samples=8), new_data)
    behind = (LANGUAGE + "layers.2", LANGUAGE + "layers.3")
    later = {name for name in reach.trainable if name.startswith(behind)}
    assert reach.downstream == later | {HEAD, LANGUAGE + "norm.weight"}
    assert not reach.retained & reach.downstream


def test_looking_changes_nothing(student: Any, teacher: Any, cache: Path, new_data: Any) -> None:
    reach_of(student, cache, new_data)
    for (name, p), (_, q) in zip(
        student.policy.named_parameters(), teacher.policy.named_parameters(), strict=True
    ):
        assert p.grad is None, name
        assert torch.equal(p, q), name


def test_frozen_parameters_leave_the_trainable_ones(
    student: Any, cache: Path, new_data: Any
) -> None:
    freeze(student.policy, frozenset({HEAD}))
    reach = reach_of(student, cache, new_data)
    assert HEAD not in reach.trainable
    assert reach.downstream == {LANGUAGE + "norm.weight"}


def test_retention_that_reaches_nothing_is_refused(
    student: Any, cache: Path, new_data: Any
) -> None:
    """As when only an action head is trained."""
    freeze(student.policy, frozenset(n for n, _ in student.policy.named_parameters() if n != HEAD))
    head_only = reach_of(student, cache, new_data)
    assert not head_only.retained
    with pytest.raises(CraftError, match="reaches none of the 1 trainable") as caught:
        require_reach(head_only)
    assert caught.value.exit_code == EXIT_CHECK_FAILED


def made(*, held: int, behind: int, other: int = 0, free: bool = True) -> GradientReach:
    """A policy of three tensors: one held, one behind what is held, one that nothing holds."""
    names = frozenset({"held", "behind", "other"})
    downstream = frozenset({"behind"}) if behind else frozenset()
    return GradientReach(
        trainable=names,
        retained=frozenset({"held"} if free else {"held", "behind"}),
        downstream=downstream,
        free=downstream if free else frozenset(),
        sizes={"held": held, "behind": behind, "other": other},
    )


@pytest.mark.parametrize(
    ("reach", "chosen", "freezes"),
    [
        (made(held=80, behind=20), None, True),
        (made(held=79, behind=21), None, False),
        (made(held=79, behind=21), True, True),
        (made(held=80, behind=20), False, False),
        (made(held=80, behind=20, free=False), None, False),
        (made(held=100, behind=0), None, False),
    ],
    ids=["small", "large", "asked for", "refused", "held by outputs", "nothing behind"],
)
def test_a_small_part_behind_what_is_held_is_frozen_unless_the_user_decides(
    reach: GradientReach, chosen: bool | None, freezes: bool
) -> None:
    assert reach.freezes(chosen) is freezes


def test_next_to_nothing_is_refused_by_weights_and_not_by_tensors() -> None:
    little = made(held=1, behind=0, other=999)
    with pytest.raises(CraftError, match="Retention would hold next to nothing") as caught:
        require_reach(little)
    assert caught.value.exit_code == EXIT_CHECK_FAILED
    assert "1 of 3 trained tensors, under 1 % of the trained weights" in caught.value.why
    assert "--mode hidden+action" in caught.value.fix
    require_reach(made(held=20, behind=0, other=980))


def test_what_is_frozen_does_not_count_as_trained() -> None:
    reach = made(held=5, behind=995)
    assert reach.trained(frozen=True) == {"held", "other"}
    assert describe_share(reach, frozen=True).endswith("tensors, 100 % of the trained weights")
    require_reach(reach, frozen=True)
    with pytest.raises(CraftError, match="next to nothing"):
        require_reach(reach, frozen=False)


def test_less_than_half_is_a_warning() -> None:
    assert describe_little(made(held=60, behind=0, other=40), frozen=False) is None
    text = describe_little(made(held=30, behind=0, other=70), frozen=False)
    assert text is not None
    assert text.startswith("retention holds 30 % of the trained weights: the rest can drift.")


def test_one_forward_pass_of_one_row_serves_all_modes(
    student: Any, cache: Path, new_data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, rows = Imitation.features, []

    def counted(term: Imitation, batch: Any) -> Any:
        rows.append({len(values) for values in batch.inputs.values()})
        return features(term, batch)

    monkeypatch.setattr(Imitation, "features", counted)
    reach_of(student, cache, new_data, "hidden+action")
    assert rows == [{1}]


def test_one_row_shows_what_a_whole_batch_shows(
    student: Any, cache: Path, new_data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = reach_of(student, cache, new_data)
    monkeypatch.setattr("craftcli.engine.retention.imitation.PROBE_ROWS", 4)
    assert reach_of(student, cache, new_data) == few


def test_what_is_held_anyway_is_not_looked_for(student: Any, cache: Path) -> None:
    """No task sample is run: an empty batch would fail."""
    config = TrainConfig(mode="hidden+action", anchor_batch_size=4)
    terms = open_retention(config, student, cache).terms
    reach = find_reach(student.policy, student.adapter, terms, {}, only_free=True)
    assert reach.retained == reach.trainable
    assert reach.downstream == reach.free == frozenset()
    assert not reach.idle
    assert not reach.freezes(None)


def test_what_may_be_free_is_looked_for(student: Any, cache: Path, new_data: Any) -> None:
    terms = open_retention(TrainConfig(mode="hidden", anchor_batch_size=4), student, cache).terms
    batch = student.preprocess(read_rows(new_data, [0, 1]))
    reach = find_reach(student.policy, student.adapter, terms, batch, only_free=True)
    assert reach.free == {HEAD, LANGUAGE + "norm.weight"}


def test_a_mode_that_holds_only_what_is_frozen_is_idle(
    student: Any, cache: Path, new_data: Any
) -> None:
    """The outputs reach all that is trained, and the hidden states none of it."""
    names = frozenset(name for name, _ in student.policy.named_parameters())
    freeze(student.policy, names - {HEAD})
    reach = reach_of(student, cache, new_data, "hidden+action")
    assert reach.retained == reach.trainable == {HEAD}
    assert reach.idle == (Mode.HIDDEN,)

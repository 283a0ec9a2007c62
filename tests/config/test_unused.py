"""Settings without effect are named, with what they would need; others never are."""

from typing import Any

import pytest

from craftcli.choices import Controller, Kind, LossKind, Merge, Mode, OutputKind, SurgeryScope
from craftcli.config.cache import CacheConfig
from craftcli.config.retention import RetentionConfig
from craftcli.config.settings import resolve
from craftcli.config.train import TrainConfig
from craftcli.config.unused import unused_in_building, unused_in_training

TOKENS, VECTORS = OutputKind.TOKENS, OutputKind.VECTORS


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lambda_kp": 2.0}, ["--lambda-kp (without --controller nupi)"]),
        (
            {"lambda_kp": 2.0, "lambda_nu": 0.5},
            ["--lambda-kp, --lambda-nu (without --controller nupi)"],
        ),
        ({"lambda_kp": 2.0, "lambda_nu": 0.5, "controller": "nupi"}, []),
        ({"fisher_samples": 8}, ["--fisher-samples (without --mode ewc)"]),
        ({"fisher_samples": 8, "mode": "hidden+ewc"}, []),
        (
            {"surgery": "none", "conflict_threshold": 0.0, "project_when": "violated"},
            ["--conflict-threshold, --project-when (without --surgery)"],
        ),
        ({"surgery": "per_layer", "conflict_threshold": 0.0, "project_when": "violated"}, []),
        (
            {"merge": "upgrad", "conflict_threshold": 0.0},
            ["--conflict-threshold (without a --merge that projects)"],
        ),
        ({"merge": "equal", "conflict_threshold": 0.0}, []),
        (
            {"merge": "equal", "lambda_init": 2.0, "controller": "nupi"},
            ["--lambda-init, --controller (without a --merge that weighs)"],
        ),
        (
            {"mode": "l2sp", "anchor_batch_size": 4},
            ["--anchor-batch-size (without a --mode with anchors)"],
        ),
        ({"mode": "hidden", "constraints": "each"}, ["--constraints (without several modes)"]),
        (
            {"mode": "none", "other_student": True},
            ["--other-student (without a --mode that retains)"],
        ),
        ({"loss": "mse"}, []),
        ({"loss": "mse", "mode": "hidden"}, []),
        ({"loss": "mse", "mode": "token_ce"}, ["--loss (without --mode hidden)"]),
        ({"loss": "mse", "mode": "replay+l2sp+ewc"}, ["--loss (without --mode hidden)"]),
        (
            {"loss": "mse", "mode": "replay", "lambda_nu": 0.5, "fisher_samples": 3},
            [
                "--lambda-nu (without --controller nupi)",
                "--fisher-samples (without --mode ewc)",
                "--loss (without --mode hidden)",
            ],
        ),
        (
            {"mode": "none", "lambda_init": 2.0, "loss": "mse", "grad_accum": 2, "seed": 1},
            ["--loss, --lambda-init (without a --mode that retains)"],
        ),
    ],
    ids=str,
)
def test_a_setting_without_effect_is_named(settings: dict[str, Any], expected: list[str]) -> None:
    source = resolve(TrainConfig, flags=settings)
    assert unused_in_training(source.settings, source.given) == expected


@pytest.mark.parametrize(("output", "used"), [(TOKENS, False), (VECTORS, True), (None, True)])
def test_only_actions_that_are_vectors_have_a_loss_to_choose(
    output: OutputKind | None, used: bool
) -> None:
    alone = RetentionConfig(mode="action", loss=LossKind.MSE)
    assert (unused_in_training(alone, {"loss"}, output=output) == []) == used
    beside = RetentionConfig(mode="hidden+action", loss=LossKind.MSE)
    assert unused_in_training(beside, {"loss"}, output=output) == []


@pytest.mark.parametrize(
    ("kinds", "output", "expected"),
    [
        ((Kind.HIDDEN, Kind.ACTION), TOKENS, []),
        ((Kind.HIDDEN, Kind.ACTION), VECTORS, ["--top-k (without a policy that predicts tokens)"]),
        ((Kind.HIDDEN,), TOKENS, ["--top-k (without --kind action)"]),
        ((Kind.HIDDEN, Kind.TOKEN_CE), TOKENS, ["--top-k (without --kind action)"]),
        ((Kind.HIDDEN,), None, ["--top-k (without --kind action)"]),
    ],
)
def test_the_likeliest_tokens_are_stored_for_one_kind(
    kinds: tuple[Kind, ...], output: OutputKind | None, expected: list[str]
) -> None:
    source = resolve(CacheConfig, flags={"top_k": 8, "seed": 1})
    assert unused_in_building(kinds, source.given, output=output) == expected
    assert unused_in_building(kinds, resolve(CacheConfig, flags={}).given, output=output) == []


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("surgery", list(SurgeryScope))
@pytest.mark.parametrize("controller", list(Controller))
@pytest.mark.parametrize("merge", [Merge.WEIGHTED, Merge.MGDA])
def test_defaults_are_never_named(
    mode: Mode, surgery: SurgeryScope, controller: Controller, merge: Merge
) -> None:
    config = TrainConfig(mode=mode.value, surgery=surgery, controller=controller, merge=merge)
    assert unused_in_training(config, {"mode"}, output=TOKENS) == []
    source = resolve(TrainConfig, flags={}, demo={"steps": 3}, defaults={"loss": "mse"})
    assert source.given == frozenset()


def test_a_file_gives_settings_too(tmp_path: Any) -> None:
    (tmp_path / "run.toml").write_text("lambda-nu = 0.5\n")
    source = resolve(TrainConfig, flags={"steps": 3}, file=tmp_path / "run.toml")
    assert source.given == {"lambda_nu", "steps"}

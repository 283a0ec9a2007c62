"""Options as `lerobot-train` writes them: taken where they mean the same, else explained."""

from collections.abc import Callable
from typing import Any

import pytest

INSTEAD = {
    "--wandb.enable=true": "use --tracker wandb.",
    "--wandb.project=mine": "--tracker wandb",
    "--optimizer.lr=1e-4": "use --lr.",
    "--optimizer.weight_decay=0": "--lr-schedule",
    "--eval_freq=100": "--eval-every N",
    "--peft.r=8": "--lora r=R",
    "--peft.method_type=LORA": "--lora SPEC",
    "--resume=true": "use --resume RUN",
    "--config_path=outputs/train_config.json": "--resume RUN",
    "--policy.device=cuda": "use --device.",
    "--policy.push_to_hub=false": "hf upload",
    "--rename_map={}": "use --rename OLD=NEW.",
    "--overwrite=true": "use --overwrite, without a value.",
    "--freeze_downstream": "use --freeze-downstream.",
    "--overwrite=false": "use --no-overwrite.",
}


@pytest.mark.parametrize(("option", "instead"), INSTEAD.items())
def test_an_option_of_lerobot_is_refused_with_the_one_of_craft(
    craft: Callable[..., Any], option: str, instead: str
) -> None:
    result = craft("train", option)
    assert result.exit_code == 2
    assert result.stdout == ""
    what, why, fix = result.stderr.splitlines()
    assert what.startswith("Error: craft has no option --")
    assert "LeRobot" in why
    assert instead in fix


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("--policy.path=runs/a", "craft eval RUN_OR_POLICY"),
        ("--env.type=pusht", "use --env ENV."),
        ("--eval.n_episodes=10", "use --episodes."),
        ("--policy.device=cuda", "use --device."),
    ],
)
def test_an_option_of_lerobot_eval_is_refused_with_that_of_craft_eval(
    craft: Callable[..., Any], option: str, instead: str
) -> None:
    result = craft("eval", "runs/a", option)
    assert result.exit_code == 2
    assert instead in result.stderr


def test_the_value_of_an_option_is_not_taken_for_an_option(craft: Callable[..., Any]) -> None:
    # An instruction may be any text, and so may a folder.
    result = craft("train", "--policy", "a/b", "--config", "eval_freq=1")
    assert "Cannot read the configuration eval_freq=1" in result.stderr


def test_other_unknown_options_are_usage_errors(craft: Callable[..., Any]) -> None:
    result = craft("train", "--no-such-option")
    assert result.exit_code == 2
    assert "No such option" in result.stderr


def test_a_flag_of_a_build_takes_no_value(craft: Callable[..., Any]) -> None:
    result = craft("cache", "build", "--resume=true")
    assert "use --resume, without a value." in result.stderr

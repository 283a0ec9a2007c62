"""Options of `lerobot-train` that craft spells differently or does not have: which to use instead.

craft takes LeRobot's spellings where an option means the same (`--policy.path`, `--batch_size`).
Where it does not, a user who comes from LeRobot reads here what to write.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import typer

from craftcli.cli.output import Output
from craftcli.errors import EXIT_USAGE, CraftError

_PRESET = "leave it out: the policy's own preset is used; --lr and --lr-schedule change it."
_SIMULATION = "leave it out, and afterwards run craft eval RUN --env ENV --episodes N."
_MEASURING = "--eval-every N, with --eval-env ENV for episodes in simulation."
_NO_UPLOAD = "leave it out: craft uploads nothing; hf upload does, afterwards."

_INSTEAD: Mapping[str, str] = {
    "--wandb.enable": "--tracker wandb",
    "--wandb.mode": "--tracker wandb, and WANDB_MODE in the environment.",
    "--wandb.*": "--tracker wandb; the other settings of W&B are read from its environment "
    "variables, such as WANDB_ENTITY.",
    "--optimizer.lr": "--lr",
    "--policy.optimizer_lr": "--lr",
    "--scheduler.type": "--lr-schedule",
    "--optimizer.*": _PRESET,
    "--scheduler.*": _PRESET,
    "--policy.optimizer_*": _PRESET,
    "--policy.scheduler_*": _PRESET,
    "--use_policy_training_preset": _PRESET,
    "--eval_freq": _MEASURING,
    "--eval_steps": _MEASURING,
    "--max_eval_samples": _SIMULATION,
    "--eval.*": _SIMULATION,
    "--env.*": _SIMULATION,
    "--env_eval_freq": _MEASURING,
    "--peft.r": "--lora r=R, as in --lora r=16.",
    "--peft.*": "--lora SPEC, as in --lora r=8,alpha=16.",
    "--config_path": "--resume RUN to continue a run of craft, or --config FILE.toml for settings.",
    "--policy.type": "--policy POLICY: craft fine-tunes a policy that exists.",
    "--policy.pretrained_path": "--policy",
    "--policy.device": "--device",
    "--policy.use_amp": "--amp bf16",
    "--policy.dtype": "--amp bf16",
    "--policy.gradient_checkpointing": "--gradient-checkpointing",
    "--policy.push_to_hub": _NO_UPLOAD,
    "--policy.repo_id": _NO_UPLOAD,
    "--save_checkpoint_to_hub": _NO_UPLOAD,
    "--policy.*": "leave it out: craft keeps the policy's own configuration; to change it, edit "
    "the config.json of a copy.",
    "--dataset.episodes": "split the dataset with lerobot-edit-dataset: all of it is read here.",
    "--dataset.*": "leave it out: the dataset is read as it is, by LeRobot's defaults.",
    "--rename_map": "--rename OLD=NEW",
    "--job_name": "--output FOLDER, whose name is the run's.",
    "--save_checkpoint": "--save-every N; the last step is always saved.",
}
"""What to write for an option of LeRobot: another option, or what to do. The first match counts."""

_YES_NO = ("true", "false", "True", "False")


def refuse_lerobot_options(args: Sequence[str], known: Mapping[str, bool]) -> None:
    """Stop with an explanation at the first argument that only `lerobot-train` understands.

    Args:
        args: the arguments of a command.
        known: every spelling of its options, and whether it is a flag.
    """
    for arg in args:
        if arg == "--":
            return
        name, equals, value = arg.partition("=")
        if not name.startswith("--"):
            continue
        instead = _of_known(name, value, known) if name in known else _of_unknown(name, known)
        if instead and (equals or name not in known):
            _refuse(name + equals + value if name in known else name, instead)


def _of_known(name: str, value: str, known: Mapping[str, bool]) -> str | None:
    """What to write for an option that craft has, when its value is a yes or no of LeRobot."""
    if value not in _YES_NO:
        return None
    if not known[name]:
        return f"{name} RUN, with the folder of the run." if name == "--resume" else None
    if value.lower() == "true":
        return f"{name}, without a value."
    unset = f"--no-{name.removeprefix('--')}"
    return unset if unset in known else f"leave it out: without {name} it is off."


def _of_unknown(name: str, known: Mapping[str, bool]) -> str | None:
    dashed = name.replace("_", "-")
    if dashed in known:
        return dashed
    return next((text for like, text in _INSTEAD.items() if fnmatchcase(name, like)), None)


def _refuse(given: str, instead: str) -> None:
    Output().error(
        CraftError(
            f"craft has no option {given}.",
            why="lerobot-train writes options like that; craft does not.",
            fix=("use " if instead.startswith("--") else "") + instead.removesuffix(".") + ".",
            exit_code=EXIT_USAGE,
        )
    )
    raise typer.Exit(EXIT_USAGE)

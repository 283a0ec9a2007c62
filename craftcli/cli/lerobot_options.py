"""Options of LeRobot's commands that craft spells differently or lacks: which to use instead.

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

_INSTEAD_IN_EVAL: Mapping[str, str] = {
    "--policy.path": "craft eval RUN_OR_POLICY: the policy is named without an option.",
    "--policy.pretrained_path": "craft eval RUN_OR_POLICY: the policy is named without an option.",
    "--policy.device": "--device",
    "--env.type": "--env ENV",
    "--env.task": "--env ENV:TASK, as in --env metaworld:door-open-v3.",
    "--env.*": "--env ENV",
    "--eval.n_episodes": "--episodes",
    "--eval.batch_size": "--batch-size",
    "--eval.*": "--episodes, --batch-size and --workers.",
    "--output_dir": "--output FILE, for the result.",
}
"""The same for `lerobot-eval` and `craft eval`."""

_YES_NO = ("true", "false", "True", "False")


def refuse_lerobot_options(
    command: str | None, args: Sequence[str], known: Mapping[str, bool]
) -> None:
    """Stop with an explanation at the first argument that only LeRobot understands.

    Args:
        command: its name.
        args: its arguments.
        known: every spelling of its options, and whether it is a flag.
    """
    instead_of = {**_INSTEAD_IN_EVAL, **_INSTEAD} if command == "eval" else _INSTEAD
    for arg in args:
        if arg == "--":
            return
        name, equals, value = arg.partition("=")
        if not name.startswith("--"):
            continue
        if name in known:
            if equals and (instead := _of_known(name, value, known)):
                _refuse(name + equals + value, instead)
        elif instead := _of_unknown(name, known, instead_of):
            _refuse(name, instead)


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


def _of_unknown(name: str, known: Mapping[str, bool], instead_of: Mapping[str, str]) -> str | None:
    dashed = name.replace("_", "-")
    if dashed in known:
        return dashed
    return next((text for like, text in instead_of.items() if fnmatchcase(name, like)), None)


def _refuse(given: str, instead: str) -> None:
    Output().error(
        CraftError(
            f"craft has no option {given}.",
            why="LeRobot's commands write options like that; craft does not.",
            fix=("use " if instead.startswith("--") else "") + instead.removesuffix(".") + ".",
            exit_code=EXIT_USAGE,
        )
    )
    raise typer.Exit(EXIT_USAGE)

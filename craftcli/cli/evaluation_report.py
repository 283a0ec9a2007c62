"""How the result of `craft eval` is printed."""

from typing import TYPE_CHECKING

from craftcli.cli.next_steps import held_out_build
from craftcli.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from craftcli.cache.format import Manifest
    from craftcli.evaluation.results import DatasetLoss, Drift, Evaluation, InstructionCheck

_MATTERS = 0.05
"""A change of actions, by their variance, from which on an instruction matters."""
_SHARE_LEFT = 0.2
"""The share of the teacher's change below which a policy hardly reads its instructions."""


def show_evaluation(result: "Evaluation", output: Output) -> None:
    """Print all results, and warn of what could not be measured."""
    policy = result.policy
    step = "" if policy.step is None else f", step {policy.step}"
    output.say(f"{policy.source}: {policy.policy_type}{step}")
    if result.drift:
        _show_drift(result.drift, output)
    for loss in result.losses:
        _show_loss(loss, result.teacher_losses, output)
    if result.instructions is not None:
        _show_instructions(result.instructions, output)
    if result.success:
        episodes = len(result.success[0].episodes)
        rows = {}
        of_teacher = {found.environment: found.rate for found in result.teacher_success}
        for success in result.success:
            low, high = success.interval
            text = f"{success.rate:.2f}  [{low:.2f}, {high:.2f}]"
            if success.environment in of_teacher:
                text += f"  teacher {of_teacher[success.environment]:.2f}"
            rows[_named(success.environment, success.group)] = text
        output.table(f"\nSuccess in {episodes} episodes, with 95 % interval", rows)
    for success in result.success:
        if success.crashed:
            output.warn(
                f"{len(success.crashed)} episodes of {success.environment} crashed and count as "
                f"failed; the first, of seed {success.crashed[0].seed}: {success.crashed[0].error}."
            )
    for reason in result.left_out:
        output.warn(f"left out: {reason}")


def _show_loss(loss: "DatasetLoss", of_teacher: "Sequence[DatasetLoss]", output: Output) -> None:
    """Print the loss on a dataset, and the teacher's beside it if that was measured."""
    same = (loss.fingerprint, loss.group)
    teacher = next((t for t in of_teacher if (t.fingerprint, t.group) == same), None)
    rows = {f"{loss.frames} frames": f"{loss.mean:.4f}"}
    rows |= {f"  {task}": f"{mean:.4f}" for task, mean in loss.by_task.items()}
    if teacher is not None:
        theirs = (teacher.mean, *(teacher.by_task[task] for task in loss.by_task))
        rows = {
            name: f"{own}  teacher {mean:.4f}"
            for (name, own), mean in zip(rows.items(), theirs, strict=True)
        }
    output.table(f"\nLoss on {_named(loss.dataset, loss.group)}", rows)


def _show_instructions(check: "InstructionCheck", output: Output) -> None:
    """Print how much the instruction matters; warn where it hardly does any more."""
    if check.skipped is not None:
        output.note(f"Instruction check skipped: {check.skipped}.")
        return

    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    rows = {
        _named(effect.dataset, effect.group): f"{figure(effect.policy)}"
        + ("" if effect.teacher is None else f"  teacher {figure(effect.teacher)}")
        for effect in check.effects
    }
    output.table("\nChange of the actions under another instruction, by their variance", rows)
    for effect in check.effects:
        if effect.policy is None or effect.teacher is None:
            continue
        if effect.teacher > _MATTERS and effect.policy < _SHARE_LEFT * effect.teacher:
            output.warn(
                f"on {effect.dataset} the policy hardly reads its instructions any more: another "
                f"one changes its actions by {effect.policy:.3f}, the teacher's by "
                f"{effect.teacher:.3f} of their variance."
            )


def _show_drift(drift: "Drift", output: Output) -> None:
    rows = {f"L_ret {mode}": f"{value:.4f}" for mode, value in drift.l_ret.items()}
    for layer in drift.layers:
        rows[layer.layer] = f"nmse {layer.nmse:.4f}  CKA {layer.cka:.4f}"
    if drift.action:
        rows["actions"] = f"{drift.action.kind} {drift.action.value:.4f}"
    which = "held-out anchors" if drift.shared_rows == 0 else "anchors"
    output.table(f"\nDrift on {drift.rows} {which} of {drift.cache}", rows)


def warn_of_shared(drift: "Drift", manifest: "Manifest", output: Output) -> None:
    """Warn that the run was trained to hold these anchors, and say how to get others."""
    command = held_out_build(drift.cache, manifest)
    output.warn(
        f"{drift.shared_rows} of these {drift.rows} anchors were used in training. For held-out "
        f"ones: {command or 'train with --held-out-share 0.1, which keeps some apart.'}"
    )


def _named(name: str, group: str | None) -> str:
    return f"{name} ({group})" if group else name

"""What `craft eval` prints."""

from typing import TYPE_CHECKING

from craftcli.cli.output import Output

if TYPE_CHECKING:
    from craftcli.evaluation.findings import Drift
    from craftcli.evaluation.record import Evaluation


def say_evaluation(result: "Evaluation", output: Output) -> None:
    """Say all that was measured, and warn of what was not."""
    policy = result.policy
    step = "" if policy.step is None else f", step {policy.step}"
    output.say(f"{policy.source}: {policy.policy_type}{step}")
    if result.drift:
        _say_drift(result.drift, output)
    for loss in result.losses:
        rows = {f"{loss.frames} frames": f"{loss.mean:.4f}"}
        rows |= {f"  {task}": f"{mean:.4f}" for task, mean in loss.by_task.items()}
        output.table(f"\nLoss on {_named(loss.dataset, loss.group)}", rows)
    if result.success:
        episodes = len(result.success[0].episodes)
        rows = {}
        for success in result.success:
            low, high = success.interval
            rows[_named(success.environment, success.group)] = (
                f"{success.rate:.2f}  [{low:.2f}, {high:.2f}]"
            )
        output.table(f"\nSuccess in {episodes} episodes, with 95 % interval", rows)
    for success in result.success:
        if success.crashed:
            output.warn(
                f"{len(success.crashed)} episodes of {success.environment} crashed and count as "
                f"failed; the first, of seed {success.crashed[0].seed}: {success.crashed[0].error}."
            )
    for reason in result.left_out:
        output.warn(f"left out: {reason}")


def _say_drift(drift: "Drift", output: Output) -> None:
    rows = {f"L_ret {mode}": f"{value:.4f}" for mode, value in drift.l_ret.items()}
    for layer in drift.layers:
        rows[layer.layer] = f"nmse {layer.nmse:.4f}  CKA {layer.cka:.4f}"
    if drift.action:
        rows["actions"] = f"{drift.action.kind} {drift.action.value:.4f}"
    which = "held-out anchors" if drift.shared_rows == 0 else "anchors"
    output.table(f"\nDrift on {drift.rows} {which} of {drift.cache}", rows)
    if drift.shared_rows:
        output.warn(
            f"{drift.shared_rows} of these {drift.rows} anchors are those that the run was trained "
            "to hold. Held-out ones: craft cache build --exclude "
            f"{drift.cache} --output held_out.zarr"
        )


def _named(name: str, group: str | None) -> str:
    return f"{name} ({group})" if group else name

"""Lets a policy act in environments, and says how it went: for `cache build` and `train`."""

from typing import TYPE_CHECKING

from craftcli.cli.output import Output
from craftcli.config.cache import CacheConfig

if TYPE_CHECKING:
    from craftcli.cache.build.recorded_rows import RecordedFrames
    from craftcli.policies.lerobot.checkpoint import Checkpoint


def record_episodes(
    config: CacheConfig, teacher: "Checkpoint", output: Output, *, exact: bool
) -> "RecordedFrames":
    """Record; says how many frames there were, and the policy's success.

    Unless `exact`, fewer frames than the settings ask for will do.
    """
    from craftcli.evaluation.recording import open_all, record_frames

    environments = open_all(config.environments, teacher.policy.config)
    count = config.env_episodes * len(environments)
    with output.progress(count, "episodes", "Recording") as advance:
        recording = record_frames(config, teacher, exact=exact, on_episodes=advance)
    for success in recording.successes:
        output.say(
            f"The teacher acted in {len(success.episodes)} episodes of {success.environment} and "
            f"succeeded in {success.count}."
        )
        if not success.count:
            output.warn(
                f"The teacher never succeeded in {success.environment}: the anchors hold what it "
                "does there, which is not that skill."
            )
    drawn = len(recording.recorded.frames)
    output.say(f"Drew {drawn} of the {recording.frames_seen} frames that it saw.")
    return recording.recorded

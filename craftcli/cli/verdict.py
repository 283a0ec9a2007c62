"""Shows the verdict on a run: `craft train` ends with it, `craft eval` begins with it."""

from typing import TYPE_CHECKING

from craftcli.cli.output import Output

if TYPE_CHECKING:
    from craftcli.engine.verdict import Verdict


def show_verdict(verdict: "Verdict", output: Output) -> None:
    """Say whether L_ret kept to its budget; warn if something should be changed."""
    if verdict.needs_action:
        output.warn(verdict.text)
    else:
        output.say(verdict.text)

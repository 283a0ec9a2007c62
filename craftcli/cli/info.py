"""`craft info`: versions, devices and policies, to look up or to paste into a report."""

from typing import TYPE_CHECKING, Annotated

import typer

from craftcli.cli.options import AsJson, Debug, epilog, guarded
from craftcli.cli.output import Output
from craftcli.cli.quiet import quiet_libraries
from craftcli.config import DEMO
from craftcli.errors import EXIT_USAGE, CraftError

if TYPE_CHECKING:
    from craftcli.policies.families import FamilyInfo, PolicyInfo

_MISSING = "not installed"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        "info",
        help="Show versions and devices, or which policies craft can retain and how.",
        epilog=epilog(
            "craft info",
            "craft info --policies",
            "craft info --policies --policy outputs/my_policy --json",
        ),
    )(info)


def info(
    policies: Annotated[
        bool, typer.Option("--policies", help="The policy families, and what each can do.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            "--policy.path",
            help="With --policies: the stacks and lists of layers of this policy, or of demo.",
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run Python code that comes with the policy's tokenizers."
        ),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what is here."""

    def act(output: Output) -> None:
        if policy and not policies:
            raise CraftError(
                "--policy needs --policies.",
                why="without it, only this machine is described.",
                fix=f"craft info --policies --policy {policy}",
                exit_code=EXIT_USAGE,
            )
        if policy:
            _show_policy(policy, output, trust_remote_code=trust_remote_code)
        elif policies:
            _show_families(output)
        else:
            _show_machine(output)

    guarded(act, as_json=as_json, debug=debug)


def _show_machine(output: Output) -> None:
    from craftcli.report.machine import describe_machine

    machine = describe_machine()
    rows: dict[str, str] = {
        "craft": machine.craft,
        "python": machine.python,
        "platform": machine.platform,
        "cpus": str(machine.cpus),
        "gpus": "; ".join(machine.gpus) or "none found",
    }
    rows |= {name: found or _MISSING for name, found in machine.packages.items()}
    for extra, names in machine.extras.items():
        told = [f"{name} {found or _MISSING}" for name, found in names.items()]
        rows[f"extra {extra}"] = ", ".join(told)
    output.table("", rows)
    output.json(machine.to_json())


def _show_families(output: Output) -> None:
    with output.status("Loading LeRobot's policies ..."):
        quiet_libraries(debug=output.debug)
        from craftcli.policies.families import all_families

        families = all_families()
    output.table(
        "Policies with an adapter",
        {f.policy_type: _described(f) for f in families if f.adapter != "generic"},
    )
    others = {f.policy_type: _described(f) for f in families if f.adapter == "generic"}
    output.table("Policies that the generic adapter serves", others)
    output.note("Layers are counted in a checkpoint: craft info --policies --policy POLICY.")
    output.json([family.to_json() for family in families])


def _show_policy(source: str, output: Output, *, trust_remote_code: bool) -> None:
    with output.status("Loading the policy ..."):
        quiet_libraries(debug=output.debug)
        from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
        from craftcli.policies.families import policy_info
        from craftcli.policies.loading import load_checkpoint

        folder = str(TEACHER_FOLDER) if source == DEMO else source
        found = load_checkpoint(folder, device="cpu", trust_remote_code=trust_remote_code)
    shown = policy_info(found)
    output.table(f"{source}: {shown.family.policy_type}", _policy_rows(shown))
    output.say("Lists of layers, for --stack by their path")
    for path, count in shown.lists.items():
        # A table would cut them, and they are there to be copied.
        output.say(f" {path}  {count} layers")
    output.json(shown.to_json())


def _policy_rows(shown: "PolicyInfo") -> dict[str, str]:
    rows = {f"stack {name}": f"{count} layers" for name, count in shown.stacks.items()}
    return {**rows, "": _described(shown.family)}


def _described(family: "FamilyInfo") -> str:
    modes = ", ".join(family.modes)
    if family.adapter == "generic":
        return f"--stack PATH; modes {modes}; not tested here"
    layers = ",".join(map(str, family.default_layers))
    by = "tested" if family.tested else f"by {family.adapter}, not tested here"
    return (
        f"stacks {', '.join(family.stacks)}; default layers {layers}, {family.default_pooling}; "
        f"modes {modes}; {by}"
    )

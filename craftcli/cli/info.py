"""`craft info`: versions, devices and policies, to look up or to paste into a report.

Versions and devices are found without importing anything heavy.
"""

import os
import platform
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from typing import TYPE_CHECKING, Annotated, Any

import typer

from craftcli.cli.next_steps import quote
from craftcli.cli.options import AsJson, Debug, add_command, guarded
from craftcli.cli.output import Output
from craftcli.cli.quiet import quiet_libraries
from craftcli.config.policy_and_data import DEMO, REMOTE_CODE_HELP
from craftcli.engine.checkpoint_manifest import require_unchanged_policy
from craftcli.errors import EXIT_USAGE, CraftError

if TYPE_CHECKING:
    from craftcli.policies.lerobot.catalogue import FamilyInfo, PolicyInfo

_MISSING = "not installed"
_PACKAGE = "craftcli"
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(
        app,
        "info",
        info,
        help="Show versions and devices, or the policies that craft supports and how.",
        examples=(
            "craft info",
            "craft info --policies",
            "craft info --policies --policy outputs/my_policy --json",
        ),
    )


def info(
    policies: Annotated[
        bool, typer.Option("--policies", help="Show the policy families and what each supports.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            "--policy.path",
            metavar="POLICY",
            help="With --policies: show the stacks and lists of layers of this policy, or of demo.",
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help=REMOTE_CODE_HELP),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show this machine, the policy families, or one policy."""

    def act(output: Output) -> None:
        if policy and not policies:
            raise CraftError(
                "--policy needs --policies.",
                why="without it, craft info describes this machine only.",
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
        versions = [f"{name} {found or _MISSING}" for name, found in names.items()]
        rows[f"extra {extra}"] = ", ".join(versions)
    output.table("", rows)
    output.next("craft dryrun")
    output.json(machine.to_json())


def _show_families(output: Output) -> None:
    with output.status("Loading LeRobot's policies ..."):
        quiet_libraries(debug=output.debug)
        from craftcli.policies.lerobot.catalogue import all_families

        families = all_families()
    output.table(
        "Policies with an adapter",
        {f.policy_type: _described(f) for f in families if f.adapter != "generic"},
    )
    others = {f.policy_type: _described(f) for f in families if f.adapter == "generic"}
    output.table("Policies without an adapter of their own", others)
    output.next("craft info --policies --policy POLICY, for the layers of one.")
    output.json([family.to_json() for family in families])


def _show_policy(source: str, output: Output, *, trust_remote_code: bool) -> None:
    with output.status("Loading the policy ..."):
        quiet_libraries(debug=output.debug)
        from craftcli.policies.lerobot.catalogue import policy_info
        from craftcli.sources import load_policy

        require_unchanged_policy(source)
        found = load_policy(source, device="cpu", trust_remote_code=trust_remote_code)
    shown = policy_info(found)
    output.table(f"{source}: {shown.family.policy_type}", _policy_rows(shown))
    output.say("Lists of layers; --stack takes their paths")
    for path, count in shown.lists.items():
        # Not in a table, which would fold them: users copy these paths.
        output.say(f" {path}  {count} layers")
    own = "" if source == DEMO else f" --policy {quote(source)} --dataset OLD_DATA"
    output.next(f"craft cache build{own}")
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


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Versions and devices of this machine, for a report of a problem."""

    craft: str
    python: str
    platform: str
    cpus: int
    gpus: tuple[str, ...]
    """Name, memory and driver version of each."""
    packages: dict[str, str | None]
    """Versions of the packages that craft needs; None if not installed."""
    extras: dict[str, dict[str, str | None]]
    """The same for the packages of each optional extra."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def describe_machine() -> Machine:
    """Find the versions and devices of this machine."""
    needed, extras = requirements()
    return Machine(
        craft=version(_PACKAGE),
        python=platform.python_version(),
        platform=platform.platform(),
        cpus=os.cpu_count() or 1,
        gpus=_gpus(),
        packages={name: _version(name) for name in needed},
        extras={extra: {name: _version(name) for name in names} for extra, names in extras.items()},
    )


def requirements() -> tuple[list[str], dict[str, list[str]]]:
    """The packages that craft needs, and those of each extra, from its own metadata."""
    about = metadata(_PACKAGE)
    needed: list[str] = []
    extras: dict[str, list[str]] = {name: [] for name in about.get_all("Provides-Extra") or []}
    for requirement in about.get_all("Requires-Dist") or []:
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if name:
            (extras[extra[1]] if extra else needed).append(name[0])
    return needed, extras


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gpus() -> tuple[str, ...]:
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return ("Apple, by Metal (mps)",)
    if shutil.which(_QUERY[0]) is None:
        return ()
    answer = subprocess.run(_QUERY, capture_output=True, text=True, timeout=20, check=False)
    return tuple(line.strip() for line in answer.stdout.splitlines() if answer.returncode == 0)

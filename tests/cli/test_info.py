"""`craft info`: this machine, the families, and one policy."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from tiny.act import STATE_ONLY
from tiny.smolvla import SMOLVLA

from craftcli.cli import info as info_command
from craftcli.policies.families import registry

HEAVY = {"torch", "lerobot", "zarr", "transformers", "numpy"}
ALONE = """
import json, sys
from typer.testing import CliRunner
from craftcli.cli.app import app
result = CliRunner().invoke(app, ["info", "--json"])
assert result.exit_code == 0, result.output
print(json.dumps([json.loads(result.stdout), sorted(sys.modules)]))
"""


def test_it_starts_without_anything_heavy() -> None:
    ran = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    document, modules = json.loads(ran.stdout)
    assert HEAVY.isdisjoint(modules)
    assert document["python"] == ".".join(map(str, sys.version_info[:3]))
    assert document["packages"]["torch"] == version("torch")
    assert document["packages"]["lerobot"] == version("lerobot")


def test_it_reads_as_lines_to_paste(craft: Callable[..., Any]) -> None:
    result = craft("info")
    assert result.exit_code == 0
    assert re.search(rf"^ torch +{re.escape(version('torch'))} *$", result.stdout, re.MULTILINE)
    assert "gpus" in result.stdout


def test_gpus_are_those_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, craft: Callable[..., Any]
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Some GPU, 24576 MiB, 550.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert json.loads(craft("info", "--json").stdout)["gpus"] == ["Some GPU, 24576 MiB, 550.1"]
    tool.write_text("#!/bin/sh\necho 'no driver'\nexit 9\n")
    assert json.loads(craft("info", "--json").stdout)["gpus"] == []


def test_extras_name_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, craft: Callable[..., Any]
) -> None:
    found = (["torch"], {"remote": ["obstore", "no-such-package"]})
    monkeypatch.setattr(info_command, "requirements", lambda: found)
    result = craft("info")
    assert f"obstore {version('obstore')}, no-such-package not installed" in result.stdout


def test_the_families_are_those_of_the_adapters_and_of_lerobot(craft: Callable[..., Any]) -> None:
    families = {
        info["policy_type"]: info for info in json.loads(craft(*_POLICIES, "--json").stdout)
    }
    for adapter in registry.ADAPTERS:
        for name in adapter.policy_types:
            info = families[name]
            assert info["tested"]
            assert info["stacks"][0] == adapter.default_stack
            assert set(info["stacks"]) == set(adapter.stack_names)
            assert info["default_pooling"] == adapter.default_pooling
    assert "token_ce" in families["pi0_fast"]["modes"]
    assert "token_ce" not in families["act"]["modes"]
    unknown = families["tdmpc"]
    assert (unknown["adapter"], unknown["tested"]) == ("generic", False)
    assert unknown["modes"] == ["hidden", "replay", "l2sp", "ewc"]


def test_the_families_read_as_a_table(
    craft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = craft(*_POLICIES).stdout.splitlines()
    smolvla = next(line for line in lines if line.strip().startswith("smolvla"))
    assert "stacks expert, vlm; default layers -2,-1, action_tokens" in smolvla
    assert next(line for line in lines if "tdmpc" in line).rstrip().endswith("not tested here")


def test_a_policy_shows_its_layers(craft: Callable[..., Any], tmp_path: Path) -> None:
    policy = SMOLVLA.make(tmp_path / "policy")
    document = json.loads(craft(*_POLICIES, "--policy", policy, "--json").stdout)
    assert document["stacks"] == {"vlm": 4, "expert": 4}
    assert document["lists"]["model.vlm_with_expert.lm_expert.layers"] == 4
    text = craft(*_POLICIES, "--policy", policy).stdout
    assert " model.vlm_with_expert.lm_expert.layers  4 layers" in text


def test_a_policy_without_an_adapter_shows_its_lists(
    craft: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ADAPTERS", ())
    policy = STATE_ONLY.make(tmp_path / "policy")
    document = json.loads(craft(*_POLICIES, "--policy", policy, "--json").stdout)
    assert document["stacks"] == {}
    assert document["lists"]["model.decoder.layers"] == 2


def test_a_policy_alone_is_refused(craft: Callable[..., Any]) -> None:
    result = craft("info", "--policy", "demo")
    assert result.exit_code == 2
    assert "craft info --policies --policy demo" in result.stderr


_POLICIES = ("info", "--policies")

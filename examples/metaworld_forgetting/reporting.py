"""The report of every bench: a page, and in tables.md its table and picture."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from anchor_coverage import coverage_table
from arms import GROUPS, SWEEP, TUNING, choices, success
from few_frames import draw_few

from craftcli.compare.compare import Comparison, compare_runs
from craftcli.compare.report import TRADE_OFF_FILE, write_report
from craftcli.compare.table import used_columns
from craftcli.sweeps.sweep_file import SweepSpec

TABLES = Path(__file__).with_name("tables.md")
WORK = Path("runs/metaworld_forgetting")
RESULTS_FILE = "results.json"
_COLUMNS = ("old", "new", "nbt", "drift", "action_error", "anchors", "seconds")
_SUBTITLES = {
    "-ablations": ": one setting at a time",
    "-short": ": a third of the steps",
    "-share": ": how many anchors a step",
    "-typed": ": `--mode hidden` as it is typed, *held out*",
    "-coverage": ": where the anchors do not reach",
    "-recipe": ": what the defaults were chosen by",
    "-few": ": how little of the old data is enough, *held out*",
    "-little": ": no old data or sixteen frames, with all steps, *held out*",
    "-sources": ": other sources of anchors, *held out*",
    "-depth": ": hidden states of early layers, *held out*",
    "-statistics": ": which statistics, *held out*",
}


def publish(specs: Mapping[str, SweepSpec], tables: Path, reports: Path) -> None:
    """Write a page for each sweep into `reports`, and renew results and tables."""
    results = {}
    text = tables.read_text("utf-8") if tables.is_file() else ""
    for name, spec in specs.items():
        comparison = compare_runs([spec.output])
        write_report(comparison, reports / name, title=spec.title)
        tried = tuning(spec)
        results[name] = {**comparison.to_json(), "tuning": tried}
        shown = coverage_table if name.endswith("-coverage") else table
        subtitle = next((s for end, s in _SUBTITLES.items() if name.endswith(end)), "")
        parts = [f"### {spec.title}{subtitle}", shown(comparison)]
        if not subtitle:
            picture = tables.with_name(f"{name}.png")
            shutil.copyfile(reports / name / TRADE_OFF_FILE, picture)
            parts.append(f"![old against new]({picture.name})")
        if name.endswith("-few"):
            title = f"{spec.title}, {spec.arms[0].train['steps']} steps"
            picture = draw_few(comparison, tables.with_name(f"{name}.png"), title=title)
            parts.append(f"![old success by the number of old frames]({picture.name})")
        if tried:
            listed = "; ".join(f"{arm} {old:.2f} / {new:.2f}" for arm, (old, new) in tried.items())
            parts.append(f"Tuning (old / new success, first seed): {listed}.")
        text = replaced(text, name, "\n\n".join(parts))
    tables.write_text(text, encoding="utf-8")
    add_results(tables, results)


def add_results(tables: Path, results: Mapping[str, Any]) -> None:
    """Put figures into the file beside the tables, in place of older ones of the same name."""
    file = tables.with_name(RESULTS_FILE)
    before = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    document = json.dumps({**before, **results}, indent=2, ensure_ascii=False)
    file.write_text(document, encoding="utf-8")


def published(tables: Path, name: str) -> Any:
    """The figures of that name in the file beside the tables; None if there are none."""
    file = tables.with_name(RESULTS_FILE)
    return json.loads(file.read_text("utf-8")).get(name) if file.is_file() else None


def apart(work: Path, tables: Path) -> tuple[Path, Path]:
    """Where a quick run goes unless it was said: what it makes is no use to a real one."""
    if work == WORK:
        work = WORK.with_name(f"{WORK.name}_quick")
    if tables == TABLES:
        work.mkdir(parents=True, exist_ok=True)
        tables = work / "tables.md"
    return work, tables


def table(comparison: Comparison) -> str:
    """The figures of all arms in Markdown."""
    columns = [column for column in used_columns(comparison) if column.key in _COLUMNS]
    rows = [["arm", "seeds", *(column.title for column in columns)], ["---"] * (len(columns) + 2)]
    for row in comparison.rows:
        seeds = "" if row is comparison.teacher else str(row.arm.seeds)
        rows.append([row.arm.label, seeds, *(column.cell(row) for column in columns)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def tuning(spec: SweepSpec) -> dict[str, tuple[float, float]]:
    """Old and new success of everything that was tried on the way."""
    tried = [
        choice["name"]
        for group in GROUPS.values()
        for e in group
        for choice in choices(e)
        if "grid" in e
    ]
    folder = spec.output.with_name(spec.output.name.replace(SWEEP, TUNING, 1))
    measured = {name: success(replace(spec, output=folder), name) for name in tried}
    return {name: found for name, found in measured.items() if found}


def replaced(text: str, name: str, content: str) -> str:
    """The text with the part between the marks of that name renewed, or added at its end."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    part = f"{begin}\n{content}\n{end}"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if pattern.search(text):
        return pattern.sub(lambda _: part, text)
    return f"{text.rstrip()}\n\n{part}\n".lstrip()

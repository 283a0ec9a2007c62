"""Writes the report of a comparison: a page, plots and JSON."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from craftcli.compare.arm_style import STYLE
from craftcli.compare.compare import Comparison
from craftcli.compare.curves_plot import draw_curves
from craftcli.compare.page import make_page
from craftcli.compare.trade_off_plot import draw_trade_off
from craftcli.errors import CraftError
from craftcli.whole_files import write_text

DATA_FILE = "compare.json"
PAGE_FILE = "index.html"
TRADE_OFF_FILE = "trade_off.png"
CURVES_FILE = "curves.png"


@dataclass(frozen=True, kw_only=True)
class WrittenReport:
    """The files of a report."""

    page: Path
    files: tuple[Path, ...]
    """All of them; a plot without any measured value is not written."""


def check_report_folder(folder: Path) -> None:
    """Refuse a folder that holds anything but an earlier report."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / DATA_FILE).is_file():
        raise CraftError(
            f"Refusing to write into {folder}.",
            why="it is not empty, and craft compare did not write it.",
            fix="choose another folder with --output.",
        )


def check_replaced(comparison: Comparison, folder: Path, *, overwrite: bool) -> bool:
    """Whether an earlier report of the same runs is replaced; refuse to lose one of others."""
    file = folder / DATA_FILE
    if not file.is_file():
        return False
    if not overwrite and not _runs_of(_read(file)) <= _runs_of(comparison.to_json()):
        raise CraftError(
            f"The report in {folder} compares other runs.",
            why="it would be lost.",
            fix="choose another folder with --output, or add --overwrite.",
        )
    return True


def _runs_of(document: dict[str, Any]) -> set[str]:
    """The runs that a report compares, besides their teacher."""
    return {run for arm in document.get("arms", ()) for run in arm["runs"]}


def _read(file: Path) -> dict[str, Any]:
    """An earlier report; empty if it cannot be read, for then nothing is lost with it."""
    try:
        document: dict[str, Any] = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return document


def write_report(comparison: Comparison, folder: Path, *, title: str) -> WrittenReport:
    """Write the report into a folder; the files of an earlier report are replaced."""
    check_report_folder(folder)
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes; that is no reason to fail.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        plots = {
            TRADE_OFF_FILE: draw_trade_off(comparison),
            CURVES_FILE: draw_curves([row.arm for row in comparison.arms]),
        }
        page = make_page(
            comparison,
            title=title,
            trade_off=plots[TRADE_OFF_FILE],
            curves=plots[CURVES_FILE],
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            data = json.dumps(comparison.to_json(), indent=2, ensure_ascii=False)
            write_text(folder / DATA_FILE, data)
            write_text(folder / PAGE_FILE, page)
            for name, plot in plots.items():
                (folder / name).unlink(missing_ok=True)
                if plot is not None:
                    plot.savefig(folder / name, dpi=150)
        except OSError as error:
            raise CraftError(
                f"Cannot write the report to {folder}.",
                why=f"{error.strerror or error}.",
                fix="choose a writable folder with --output.",
            ) from error
    drawn = [name for name, plot in plots.items() if plot is not None]
    names = (PAGE_FILE, DATA_FILE, *drawn)
    return WrittenReport(page=folder / PAGE_FILE, files=tuple(folder / name for name in names))

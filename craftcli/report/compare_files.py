"""The files of a comparison: JSON, pictures and the page."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import matplotlib

from craftcli.errors import CraftError
from craftcli.report.arm_style import STYLE
from craftcli.report.compare import Comparison
from craftcli.report.curves_plot import draw_curves
from craftcli.report.page import make_page
from craftcli.report.trade_off_plot import draw_trade_off

DATA_FILE = "compare.json"
PAGE_FILE = "index.html"
TRADE_OFF_FILE = "trade_off.png"
CURVES_FILE = "curves.png"


@dataclass(frozen=True, kw_only=True)
class WrittenReport:
    """Where everything is."""

    page: Path
    files: tuple[Path, ...]
    """All of them; pictures of what nobody measured are missing."""


def check_report_folder(folder: Path) -> None:
    """Refuse a folder that holds anything but an older report, before any work is done."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / DATA_FILE).is_file():
        raise CraftError(
            f"{folder} is in the way.",
            why="it exists and is no report of craft compare's, so it is left alone.",
            fix="choose another folder with --output.",
        )


def write_report(comparison: Comparison, folder: Path, *, title: str) -> WrittenReport:
    """Write the report into a folder; files of an older report there are replaced."""
    check_report_folder(folder)
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # An arm may be named in a script that the font lacks: a box is drawn, and all else stands.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        pictures = {
            TRADE_OFF_FILE: draw_trade_off(comparison),
            CURVES_FILE: draw_curves([row.arm for row in comparison.arms]),
        }
        page = make_page(
            comparison,
            title=title,
            trade_off=pictures[TRADE_OFF_FILE],
            curves=pictures[CURVES_FILE],
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            data = json.dumps(comparison.to_json(), indent=2, ensure_ascii=False)
            (folder / DATA_FILE).write_text(data, encoding="utf-8")
            (folder / PAGE_FILE).write_text(page, encoding="utf-8")
            for name, picture in pictures.items():
                (folder / name).unlink(missing_ok=True)
                if picture is not None:
                    picture.savefig(folder / name, dpi=150)
        except OSError as error:
            raise CraftError(
                f"Cannot write the report to {folder}.",
                why=f"{error.strerror or error}.",
                fix="choose a folder that you may write to with --output.",
            ) from error
    drawn = [name for name, picture in pictures.items() if picture is not None]
    names = (PAGE_FILE, DATA_FILE, *drawn)
    return WrittenReport(page=folder / PAGE_FILE, files=tuple(folder / name for name in names))

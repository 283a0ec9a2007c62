"""Comparison of runs: one table row per arm over its seeds, a trade-off plot and a page.

- `runs`: reads runs, interpolated policies and evaluations from their folders
- `curves`: reads the points of training curves from files of any length
- `comparable`: keeps the measurements that can be compared, with notes on the others
- `arms`: groups runs that differ only in their seed, and names the groups
- `estimates`: means over seeds with 95 % intervals
- `compare`: puts these together into a `Comparison`
- `table`: the columns and the text of their cells
- `report`, `page`, `trade_off_plot`, `curves_plot`, `arm_style`: the files of the report
"""

from typing import TYPE_CHECKING

from craftcli.lazy_names import lazy_names

if TYPE_CHECKING:
    from craftcli.compare.compare import ArmResult, Comparison, compare_runs
    from craftcli.compare.estimates import Estimate
    from craftcli.compare.report import write_report
    from craftcli.compare.runs import Roles

__all__ = ["ArmResult", "Comparison", "Estimate", "Roles", "compare_runs", "write_report"]

# The report imports matplotlib, the table does not.
__getattr__ = lazy_names(
    __name__,
    {
        "ArmResult": "compare",
        "Comparison": "compare",
        "Estimate": "estimates",
        "Roles": "runs",
        "compare_runs": "compare",
        "write_report": "report",
    },
)

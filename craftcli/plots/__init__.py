"""Plots as PNG files, for `craft cache inspect --plot` and `craft eval --plot`.

- `cache_view`, `cache_plot`: the numbers of a cache's plot, and their drawing
- `drift_plot`: the drift of policies, layer by layer
- `png`: the style of plots, and the file
- `labels`: shortens labels
"""

from typing import TYPE_CHECKING

from craftcli.lazy_names import lazy_names

if TYPE_CHECKING:
    from craftcli.plots.cache_plot import plot_cache
    from craftcli.plots.drift_plot import plot_drift
    from craftcli.plots.png import check_plot_file

__all__ = ["check_plot_file", "plot_cache", "plot_drift"]

# Only `cache_plot` reads caches; `craft compare` uses the rest without zarr.
__getattr__ = lazy_names(
    __name__,
    {"check_plot_file": "png", "plot_cache": "cache_plot", "plot_drift": "drift_plot"},
)

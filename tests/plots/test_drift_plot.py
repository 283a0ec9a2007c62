"""The picture of a drift."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from craftcli.errors import CraftError
from craftcli.evaluation.results import ActionError, Drift, LayerDrift
from craftcli.plots.drift_plot import draw_drift, plot_drift

DRIFT = Drift(
    cache="anchors.zarr",
    cache_digest="c",
    teacher_digest="t",
    dataset_fingerprint="d",
    rows=8,
    shared_rows=0,
    loss="nmse",
    l_ret={"hidden": 0.25},
    layers=(
        LayerDrift(layer="vlm.2", nmse=0.0, cka=1.0),
        LayerDrift(layer="vlm.3", nmse=0.25, cka=0.5),
    ),
    action=ActionError(kind="kl", value=0.125, rows=8),
)


def test_every_layer_and_the_action_has_a_point_with_its_number() -> None:
    figure = draw_drift([("runs/a", DRIFT)])
    errors, alignment = figure.axes
    assert [label.get_text() for label in errors.get_yticklabels()] == [
        "vlm.2",
        "vlm.3",
        "action tokens (KL, nats)",
    ]
    assert [text.get_text() for text in errors.texts] == ["< 1e-07", "0.25", "0.12"]
    assert [text.get_text() for text in alignment.texts] == ["1.000", "0.500"]
    assert figure.get_suptitle() == "Drift from the teacher on 8 held-out anchors: runs/a"
    # Tokens are not a share of a variance.
    assert "tokens in nats" in errors.get_xlabel()


def test_the_budget_is_drawn_where_drift_is_compared_with_it() -> None:
    errors = draw_drift([("runs/a", DRIFT)], epsilon=0.02).axes[0]
    assert "budget ε = 0.02" in [text.get_text() for text in errors.texts]
    (line,) = (line for line in errors.lines if line.get_linestyle() == "--")
    assert np.asarray(line.get_xdata()).tolist() == [0.02, 0.02]
    low, high = errors.get_xlim()
    assert low < 0.02 < high


def test_several_policies_are_told_apart(tmp_path: Path) -> None:
    trained = dataclasses.replace(DRIFT, shared_rows=8, action=None)
    figure = draw_drift([("runs/a", DRIFT), ("runs/b", trained)])
    assert figure.get_suptitle() == "Drift from the teacher on 8 anchors"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["runs/a", "runs/b"]
    plot_drift([("runs/a", DRIFT)], tmp_path / "drift.png")
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CraftError, match=r"does not end in \.png"):
        plot_drift([("runs/a", DRIFT)], tmp_path / "drift.svg")

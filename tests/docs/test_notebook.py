"""The notebook runs as it is written, and holds what running it shows."""

import json

import matplotlib
import numpy as np
import pytest

from tests.conftest import ROOT

NOTEBOOK = ROOT / "docs" / "first_pictures.ipynb"


@pytest.fixture
def cells():
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_it_runs(cells, monkeypatch, capsys):
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(len(plt.gcf().axes)))
    names: dict = {"__name__": "__main__"}
    for cell in cells:
        exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
    plt.close("all")
    assert shown == [3, 8, 1]  # two figures and a colour bar, two rows of four pictures, token maps
    assert "MiB of" in capsys.readouterr().out
    full, small = names["pictures"]
    assert full.shape == small.shape == (4, 64, 64, 3)
    assert 0 < np.abs(full - small).mean() < 0.2


def test_it_shows_its_figures(cells):
    kinds = [kind for cell in cells for out in cell["outputs"] for kind in out.get("data", {})]
    assert kinds.count("image/png") == 3

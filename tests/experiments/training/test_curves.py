"""The history as a table and as events, which are nothing without tensorboardX."""

import sys
from types import SimpleNamespace

from experiments.training import curves


def test_a_column_for_every_number(tmp_path):
    lines = ['{"step": 2, "loss": 0.5}', '{"step": 4, "validation": {"parts": [3, 1]}}']
    curves.write_csv(tmp_path / "history.csv", lines)
    assert (tmp_path / "history.csv").read_text().splitlines() == [
        "step,loss,validation/parts/1,validation/parts/2",
        "2,0.5,,",
        "4,,3,1",
    ]


def test_events_go_on_after_the_checkpoint(tmp_path, monkeypatch):
    made, scalars = [], []
    writer = SimpleNamespace(
        add_scalar=lambda *given: scalars.append(given), close=lambda: made.append("closed")
    )
    library = SimpleNamespace(SummaryWriter=lambda *a, **b: made.append((a, b)) or writer)
    for there in (library, None):  # None: importing it fails
        monkeypatch.setitem(sys.modules, "tensorboardX", there)
        with curves.Events(tmp_path, start=2) as events:
            events.add({"step": 4, "validation": {"parts": [3, 1]}})
    assert made == [((str(tmp_path),), {"purge_step": 3}), "closed"]
    assert scalars[1:] == [("validation/parts/1", 3, 4), ("validation/parts/2", 1, 4)]

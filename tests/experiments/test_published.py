"""What HeadKV and LineAR print about memory, taken apart: every printed number, by arithmetic."""

import pytest

from experiments.published import numbers, rows_near
from varjax.cache.allocation import Geometry
from varjax.sequence import TokenSequence

TOTALS = numbers()["totals"]
FULL, PADDED = "full cache", "HeadKV padded"
JANUS_1B, JANUS_7B = (24, 16, 128), (30, 32, 128)
LUMINA = (32, 32, 128)
# (table, sizes, batch, {(part, method): GiB printed}, range of the rest): the ranges are those that
# an even rest has in a table. LineAR decodes all pictures of Janus-Pro at once, HeadKV does not.
PRINTED = [
    ("HeadKV", LUMINA, 6, {(1, FULL): 35.27, (1 / 8, "LineAR"): 17.31}, (1.1, 1.5)),
    ("HeadKV", LUMINA, 6, {(1 / 8, "HeadKV"): 17.21, (1 / 8, PADDED): 17.59}, (1.1, 1.5)),
    ("LineAR", LUMINA, 12, {(1, FULL): 55.48, (1 / 6, "LineAR"): 21.43}, (1.1, 1.5)),
    ("LineAR", LUMINA, 12, {(1 / 8, "LineAR"): 19.64}, (1.1, 1.5)),
    ("LineAR", LUMINA, 8, {(1, FULL): 62.95, (1 / 8, "LineAR"): 20.50}, (1.1, 1.5)),
    ("HeadKV", JANUS_7B, 55, {(1, FULL): 45.04}, (1.2, 1.3)),
    ("HeadKV", JANUS_7B, 55, {(1 / 6, "LineAR"): 22.03, (1 / 6, "HeadKV"): 21.58}, (1.9, 2.4)),
    ("HeadKV", JANUS_7B, 55, {(1 / 8, "LineAR"): 20.66, (1 / 8, "HeadKV"): 20.45}, (1.9, 2.4)),
    ("LineAR", JANUS_7B, 64, {(1, FULL): 74.01, (1 / 4, "LineAR"): 47.59}, (24, 27)),
    ("LineAR", JANUS_7B, 64, {(1 / 6, "LineAR"): 44.66}, (24, 27)),
    ("LineAR", JANUS_1B, 128, {(1, FULL): 58.68, (1 / 4, "LineAR"): 37.04}, (24, 27)),
    ("LineAR", JANUS_1B, 128, {(1 / 6, "LineAR"): 34.64}, (24, 27)),
]


def find(table, sizes, batch):
    (totals,) = (t for t in TOTALS if (t.table, t.sizes, t.batch) == (table, sizes, batch))
    return totals


@pytest.mark.parametrize(("table", "sizes", "batch", "printed", "allowed"), PRINTED)
def test_rest_of_every_printed_number(table, sizes, batch, printed, allowed):
    totals = find(table, sizes, batch)
    for (part, method), gib in printed.items():
        assert totals.printed[part][method] == gib
        assert allowed[0] <= round(totals.rest(part, method), 1) <= allowed[1]


def test_nothing_is_left_out():
    """Nine numbers are Lumina-mGPT's, eleven Janus-Pro's."""
    listed = {(*row[:3], *number) for row in PRINTED for number in row[3].items()}
    for sizes, count in ((LUMINA, 9), (JANUS_7B, 8), (JANUS_1B, 3)):
        rows = [totals for totals in TOTALS if totals.sizes == sizes]
        numbers = [
            (t.table, sizes, t.batch, (part, method), gib)
            for t in rows
            for part, methods in t.printed.items()
            for method, gib in methods.items()
        ]
        assert len(numbers) == count and set(numbers) <= listed


@pytest.mark.parametrize(
    ("sizes", "tokens", "budget", "batches"),
    [
        (JANUS_7B, 576, 0.125, [55]),
        (JANUS_7B, 576, 0.1667, [55, 64]),
        (JANUS_1B, 576, 0.25, [128]),
        (LUMINA, 48 * 49, 0.125, [6, 12]),
        (LUMINA, 64 * 65, 1.0, [8]),
        (LUMINA, 64 * 65, 0.1667, []),
        (LUMINA, 32 * 33, 0.125, []),
        (JANUS_7B, 575, 0.125, []),
    ],
)
def test_rows_of_a_model(sizes, tokens, budget, batches):
    layers, heads, size = sizes
    geometry = Geometry(
        schedule=TokenSequence(tokens, 32), num_layers=layers, num_heads=heads, head_dim=size
    )
    found = list(rows_near(geometry, budget))
    assert [totals.batch for totals, _ in found] == batches
    assert all(abs(part - budget) < 0.01 for _, part in found)


@pytest.mark.parametrize(
    ("geometry", "budget", "wanted"),
    [
        (
            "layers=32,heads=32,head_dim=128,tokens=2352,condition=70,line=49",
            "0.125",
            "keys and values 3.01 (6 bytes for K and V, text of 48), weights 13.06, the rest:"
            " HeadKV 1.14, HeadKV padded 1.52, LineAR 1.24",
        ),
        (
            "layers=30,heads=32,head_dim=128,tokens=576,condition=20",
            "1",
            "keys and values 29.96 (4 bytes for K and V, text of 20), weights 13.82, the rest:"
            " full cache 1.26",
        ),
    ],
)
def test_printed_beside_ours(call, geometry, budget, wanted):
    status, out, err = call(
        "plan", f"--geometry={geometry}", "--policy=headkv", f"--budget={budget}"
    )
    assert status == 0 and wanted in out, err or out

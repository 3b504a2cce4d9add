"""Confidence intervals of a sweep: what they are, and where they are shown."""

import numpy as np
import pytest

from experiments.evaluation.metrics import METRICS
from experiments.sweep import intervals, tables


def made_up(images, budgets=(0.1, 0.1, 0.5), seed=0):
    """Cells of sweep.json with their numbers image by image: {name: {metric: float [N]}}."""
    rng = np.random.default_rng(seed)
    cells, numbers = [], {}
    for i, budget in enumerate(budgets):
        arrays = {key: rng.uniform(0, 1, images) + i for key in METRICS}
        arrays["psnr"] = 20 + 5 * arrays["psnr"]
        numbers[f"c{i}"] = arrays
        close = {key: float(values.mean()) for key, values in arrays.items()}
        cell = {"label": f"policy{i}", "policy": "p", "budget": budget, "status": "done"}
        kv = {"planned_bytes": 100 + i, "allocated_bytes": 100 + i, "fraction": budget}
        cells.append(cell | {"samples": f"c{i}", "fidelity": close, "kv": kv})
        cells[-1]["time"] = {"steady_s_per_image": 1.0}
    return cells, numbers


def test_as_percentiles_of_resampled_means():
    """Against one resample after another; about 1.96 standard errors for many images."""
    rng = np.random.default_rng(3)
    values = rng.normal(size=(2, 400))
    found = intervals.bootstrap(values)
    means = [values[:, rng.integers(0, 400, 400)].mean(1) for _ in range(4000)]
    np.testing.assert_allclose(found, np.percentile(means, [2.5, 97.5], axis=0).T, atol=0.01)
    errors = values.std(1) / 20
    np.testing.assert_allclose((found[:, 1] - found[:, 0]) / 2, 1.96 * errors, rtol=0.05)
    assert (intervals.bootstrap(values) == found).all()


def test_nothing_is_claimed_of_one_image():
    assert np.isnan(intervals.bootstrap(np.ones((3, 1)))).all()
    assert intervals.bootstrap(np.array([[0.1, 0.1]])).tolist() == [[0.1, 0.1]]


def test_cells_of_a_budget_are_compared_with_the_best_image_by_image():
    cells, numbers = made_up(40)
    numbers["c0"]["psnr"] = numbers["c1"]["psnr"] - 0.25  # apart by the same on every image
    intervals.add(cells, numbers)
    first, second, alone = cells
    assert first["best"]["psnr"] == second["label"] and second["best"]["kl"] == first["label"]
    close = first["fidelity"]
    assert close["psnr_difference"] == pytest.approx(-0.25)
    assert close["psnr_difference_low"] == pytest.approx(-0.25)
    assert close["psnr_difference_high"] == pytest.approx(-0.25)
    assert close["psnr_low"] < numbers["c0"]["psnr"].mean() < close["psnr_high"]
    assert "psnr_difference" not in second["fidelity"] and "best" not in alone
    assert alone["fidelity"]["kl_low"] < alone["fidelity"]["kl_high"]


def test_identical_images_count_as_the_metric_says():
    cells, numbers = made_up(4)
    numbers["c0"]["psnr"] = np.array([np.inf, 100, np.inf, 100])
    numbers["c1"]["kl"] = np.array([np.inf, 1, 1, 1])
    intervals.add(cells, numbers)
    assert cells[0]["fidelity"]["psnr_low"] == cells[0]["fidelity"]["psnr_high"] == 100
    assert "kl_low" not in cells[1]["fidelity"]


def report_of(cells):
    full = {"label": "full", "policy": "full", "budget": 1.0, "status": "done"}
    full |= {"kv": cells[0]["kv"], "time": cells[0]["time"]}
    return {"reference": full, "cells": cells}


def test_tables_show_them():
    cells, numbers = made_up(30)
    intervals.add(cells, numbers)
    report = report_of(cells)
    text, row = tables.markdown_rows(report), cells[0]["fidelity"]
    shown = "{psnr:.2f} dB [{psnr_low:.2f}, {psnr_high:.2f}]"
    assert shown.format(**row) in text
    header, _, first, *_ = tables.csv_text(report).splitlines()
    named = dict(zip(header.split(","), first.split(","), strict=True))
    assert float(named["psnr_low"]) == row["psnr_low"] and named["kl_difference_high"] == ""
    assert float(named["psnr_difference"]) == row["psnr_difference"]
    differences = tables.differences_as_text(report)
    assert differences.pop(0)[:2] == ["budget", "policy"]
    assert [line[:2] for line in differences] == [["0.1", "policy0"], ["0.1", "policy1"]]
    assert differences[0][2].startswith("-") and differences[1][2] == "best"


def test_a_single_image_has_none_and_the_table_says_so():
    cells, numbers = made_up(1)
    intervals.add(cells, numbers)
    assert "psnr_low" not in cells[0]["fidelity"] and "[" not in tables.markdown_rows(
        report_of(cells)
    )
    assert tables.definitions(cells)["[low, high]"] == intervals.UNKNOWN
    assert "[low, high]" not in tables.definitions([])

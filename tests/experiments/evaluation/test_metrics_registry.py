"""The list of metrics: what tables, CSV and reports make of it."""

import numpy as np

from experiments.evaluation import metrics
from experiments.evaluation.metrics import METRICS
from experiments.sweep import tables


def test_every_metric_is_in_every_table():
    header, fields = tables.header(tables.shown([{}])), tables.csv_fields()
    judged = [metric for metric in METRICS.values() if metric.is_judged]
    own = [metric for metric in METRICS.values() if not metric.is_judged]
    columns = [metric.column for metric in own]
    assert header[4:] == [*columns, "s/image", "note"]  # and what networks judge, where they did
    means = [f"{m.key}{end}" for m in own for end in ("", "_std")]
    assert {*means, "identical_images"} <= set(fields)
    shown = tables.shown([{}, {judged[1].key: 1.0, judged[0].key: 0.1}])
    assert tables.header(shown)[4:-2] == [*columns, judged[0].column, judged[1].column]
    explained = metrics.definitions()
    assert all(metric.definition in explained.values() for metric in METRICS.values())
    assert sorted(name for names in explained for name in names.split(", ")) == sorted(
        metric.name for metric in METRICS.values()
    )


def test_what_a_result_holds_decides_what_is_compared():
    images = np.full((2, 16, 16, 3), 0.5, np.float32)
    other = {"images": images, "tokens": np.ones((2, 3))}
    close = metrics.compare_images({"images": images}, other)
    assert set(close) == {"psnr", "ssim"}
    logits = np.random.default_rng(0).normal(size=(2, 5, 4, 2)).astype(np.float32)
    forced = metrics.compare_images({"forced_logits": logits}, {"forced_logits": logits})
    assert list(forced) == ["kl"] and forced["kl"].tolist() == [0, 0]

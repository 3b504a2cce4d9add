"""Numbers that JSON lacks."""

import json

import jax.numpy as jnp
import numpy as np

from experiments.json_text import json_safe


def test_json_safe_is_strict_json_and_reads_back():
    report = {
        "psnr": np.array([1.5, np.inf], np.float32),
        "mean": np.float32(np.inf),
        "worst": -float("inf"),
        "ssim": jnp.float32(np.nan),
        "tokens": (np.int64(3), jnp.arange(2), True, None, "text"),
    }
    text = json.dumps(json_safe(report), allow_nan=False)
    assert json.loads(text) == {
        "psnr": [1.5, "inf"],
        "mean": "inf",
        "worst": "-inf",
        "ssim": "nan",
        "tokens": [3, [0, 1], True, None, "text"],
    }
    assert float(json.loads(text)["mean"]) == float("inf")

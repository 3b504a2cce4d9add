"""The embedded demo checkpoint, and its PyTorch original where that is at hand."""

import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ported_weights import convert
from ported_weights.configurations import PublishedModel
from varjax.models import registry
from varjax.nn import parameters
from varjax.storage import checkpoint, manifest

ORIGINAL = Path(__file__).parents[1] / "../../shared/data/demo_var_torch"
needs_original = pytest.mark.skipif(
    not ORIGINAL.is_dir(), reason="the PyTorch files of the demo are not part of the repository"
)


def test_the_embedded_demo():
    folder = checkpoint.demo_directory()
    content = manifest.read(folder, registry.FAMILIES)
    assert content["parameters"] == 5_386_211 and content["dtype"] == "bfloat16"
    assert content["num_classes"] == len(content["class_names"]) == 44
    assert content["sampling"] == {"cfg": 1.5, "top_k": 100, "top_p": 0.95, "more_smooth": False}
    parts, found = checkpoint.load(folder, registry.CATALOGUE, {"transformer": "float32"})
    assert found == content and list(parts) == ["transformer"]
    assert parts["transformer"].dtype == jnp.float32
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    assert size < 12e6


@pytest.fixture(scope="module")
def ported(tmp_path_factory):
    published = PublishedModel(
        model="var-custom",
        source=str(ORIGINAL / "var.pth"),
        tokenizer_source=str(ORIGINAL / "vae.pth"),
        config=str(ORIGINAL / "config_var.json"),
        tokenizer_config=str(ORIGINAL / "config_vae.json"),
    )
    out = str(tmp_path_factory.mktemp("demo") / "out")
    convert.convert(published, out, say=lambda _: None)
    return checkpoint.load(out, registry.CATALOGUE)


@needs_original
def test_the_demo_is_its_original_in_bfloat16(ported):
    demo, described = checkpoint.load(checkpoint.demo_directory(), registry.CATALOGUE)
    parts, again = ported
    for part in ("transformer", "codec"):
        ours, theirs = (parameters.named(p[part]) for p in (demo, parts))
        for name in theirs:
            chex.assert_trees_all_equal(ours[name], theirs[name].astype(jnp.bfloat16))
    strip = [{k: v for k, v in s.items() if k != "part"} for s in described["sources"]]
    assert strip == [{k: v for k, v in s.items() if k != "part"} for s in again["sources"]]
    names = json.loads((ORIGINAL / "classes.json").read_text())["classes"]
    assert described["class_names"] == names


@needs_original
def test_greedy_tokens_follow_from_teacher_forced_logits(ported):
    """Guided logits of the reference's own tokens: their arg max must be those tokens.

    The smallest gap of a decision is 0.0103, float32 differences are below 1e-3.
    """
    data = np.load(ORIGINAL / "reference.npz")
    parts, _ = ported
    schedule, labels = parts["transformer"].config.schedule, data["labels"]
    tokens = data["tokens_cfg1.5"]
    weight = 1.5 * schedule.scale_of_token[None, :, None] / (schedule.num_scales - 1)

    @jax.jit
    def guided(model, quantizer, tokens, labels):
        codes = quantizer.teacher_inputs(tokens)
        null = jnp.full_like(labels, model.config.null_label)
        return (1 + weight) * model(labels, codes) - weight * model(null, codes)

    with jax.default_matmul_precision("highest"):
        logits = guided(parts["transformer"], parts["codec"].quantizer, tokens, labels)
    chex.assert_trees_all_equal(logits.argmax(-1), tokens)
    chex.assert_trees_all_close(logits[0], data["logits_first_label_cfg1.5"], atol=1e-3, rtol=0)

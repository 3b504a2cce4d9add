"""Full-size models by shape only: nothing is allocated."""

import jax
import pytest

import varjax
from varjax import policies
from varjax.cache.planner import plan_cache
from varjax.models import registry
from varjax.nn import parameters

PUBLISHED = {
    "var-d16": 310e6,
    "var-d20": 600e6,
    "var-d24": 1.0e9,
    "var-d30": 2.0e9,
    "var-d36": 2.3e9,
    "infinity-layer12": 125e6,
    "infinity-layer16": 361e6,
    "infinity-layer24": 940e6,
    "infinity-layer32": 2.2e9,
    "infinity-layer40": 4.7e9,
    "infinity-2b": 2.2e9,
    "infinity-8b": 8.4e9,
}
TOKEN_MODELS = {  # as LlamaGen's paper and its table of checkpoints have them
    **{f"llamagen-b-{pixels}": 111e6 for pixels in (256, 384)},
    **{f"llamagen-l-{pixels}": 343e6 for pixels in (256, 384)},
    **{f"llamagen-xl-{pixels}": 775e6 for pixels in (256, 384)},
    **{f"llamagen-xxl-{pixels}": 1.4e9 for pixels in (256, 384)},
    **{f"llamagen-3b-{pixels}": 3.1e9 for pixels in (256, 384)},
    **{f"llamagen-t2i-xl-{pixels}": 775e6 for pixels in (256, 512)},
}
# Counted with the head for text, which is not loaded, Janus-Pro with the image tokenizer too:
# {name: (published, of these not in the transformer)}
PROMPT_MODELS = {
    "janus-pro-1b": (1_767e6, 102_400 * 2048 + 71.9e6),
    "janus-pro-7b": (7_083e6, 102_400 * 4096 + 71.9e6),
    **{f"lumina-mgpt-7b-{p}": (7_013e6, (65_536 - 8192) * 4096) for p in (512, 768, 1024)},
    "lumina-mgpt-34b-512": (34.3e9, (65_536 - 8192) * 8192),
}
TOKEN_MODELS |= {name: whole - left for name, (whole, left) in PROMPT_MODELS.items()}
OFTEN = ("var-d16", "var-d30", "infinity-layer12")  # planned by default; infinity-8b takes 1.1 GiB


def test_every_published_size_is_here():
    assert set(registry.PRESETS) - set(PUBLISHED) - set(TOKEN_MODELS) == {"infinity-layer48"}


@pytest.mark.parametrize("name", PUBLISHED | TOKEN_MODELS)
def test_parameter_counts(name):
    preset = registry.preset(name)
    family = registry.family(preset.family)
    part, config = family.parts["transformer"], preset.configs["transformer"]
    module = parameters.abstract(part.module, config)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(module))
    published, close = (PUBLISHED | TOKEN_MODELS)[name], 0.001 if name in PROMPT_MODELS else 0.04
    assert parameters.count(module) == pytest.approx(published, rel=close)


@pytest.mark.parametrize(
    "name",
    [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in PUBLISHED],
)
def test_plans(name):
    geometry = varjax.describe(name).geometry
    for policy in (policies.Full(), policies.Streaming(budget=0.1), policies.HeadKV(budget=0.1)):
        plan = plan_cache(geometry, policy)
        assert plan.num_bytes(1, "bfloat16") <= policy.budget * plan.dense_bytes(1, "bfloat16")


@pytest.mark.parametrize("name", ["infinity-2b", "llamagen-b-256"])
def test_repr_of_a_model_fits_a_screen(name):
    text = repr(varjax.describe(name))
    assert name in text and "parameters" in text and "pixels" in text and len(text) < 400

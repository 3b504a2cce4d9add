"""varjax: visual autoregressive models in JAX, with the published KV-cache policies under one API.

import varjax

model = varjax.load()  # the embedded demo, or varjax.load("checkpoint-folder")
images = varjax.generate(model, labels=[3, 7], policy="headkv", budget=0.25, seed=0)

generator = varjax.Generator(model, "headkv", 0.25, batch_size=8)  # compile once, call often
images = generator(labels=[3, 7], seed=1)

plan = varjax.plan(model, policy=varjax.policies.HeadKV(budget=0.1))
plan.num_bytes(batch_size=8, dtype="bfloat16")
"""

from varjax import policies
from varjax.core.errors import UserError
from varjax.core.sampling import Sampling
from varjax.editing.edit import edit
from varjax.generation.api import generate, plan
from varjax.generation.build import Build
from varjax.generation.generator import Generator
from varjax.generation.kept import kept_picture
from varjax.models.loading import describe, load
from varjax.models.model import Model

__version__ = "0.1.0"
__all__ = [
    "Build",
    "Generator",
    "Model",
    "Sampling",
    "UserError",
    "__version__",
    "describe",
    "edit",
    "generate",
    "kept_picture",
    "load",
    "plan",
    "policies",
]

"""varjax: visual autoregressive models in JAX with every KV-cache policy under one API.

import varjax

model = varjax.load()  # the embedded demo, or varjax.load("checkpoint-folder")
images = varjax.generate(model, labels=[3, 7], policy="headkv", budget=0.25, seed=0)
plan = varjax.plan(model, policy=varjax.policies.HeadKV(budget=0.1))
plan.num_bytes(batch_size=8, dtype="bfloat16")
"""

from varjax import policies
from varjax.api import Model, generate, load, plan
from varjax.errors import UserError

__version__ = "0.1.0"
__all__ = ["Model", "UserError", "__version__", "generate", "load", "plan", "policies"]

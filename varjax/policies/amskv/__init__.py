"""AMS-KV: `policy` (the policy), `rules` (its two algorithms), `arguments` (presets, checks)."""

from varjax.policies.amskv.policy import AMSKV

__all__ = ["AMSKV"]

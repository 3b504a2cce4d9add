"""ScaleKV: `policy` (the policy), `budgets` (published budget files, and own ones alike)."""

from varjax.policies.scalekv.policy import ScaleKV

__all__ = ["ScaleKV"]

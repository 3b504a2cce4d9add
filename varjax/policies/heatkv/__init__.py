"""HeatKV and its ablations: `policy` (the policies), `schedule` (which head drops what, when)."""

from varjax.policies.heatkv.policy import BinaryHeatKV, HeatKV, HeatKVNaive

__all__ = ["BinaryHeatKV", "HeatKV", "HeatKVNaive"]

"""KV-cache policies. Import order is the order of tables and help texts."""

from varjax.policies.base import Needs, Observation, Policy
from varjax.policies.registry import POLICIES, get_policy, register
from varjax.policies.windows import Full, SlidingWindow, Streaming

from varjax.policies.headkv import HeadKV  # isort: skip
from varjax.policies.table import Table  # isort: skip
from varjax.policies.heatkv import BinaryHeatKV, HeatKV, HeatKVNaive  # isort: skip

__all__ = [
    "POLICIES",
    "BinaryHeatKV",
    "Full",
    "HeadKV",
    "HeatKV",
    "HeatKVNaive",
    "Needs",
    "Observation",
    "Policy",
    "SlidingWindow",
    "Streaming",
    "Table",
    "get_policy",
    "register",
]

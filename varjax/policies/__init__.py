"""KV-cache policies. Import order is the order of tables and help texts; modules of this folder
that are not named here follow, so a new policy is found by being there."""

import importlib
import pkgutil

from varjax.core import masks
from varjax.core.observation import Needs, Observation
from varjax.core.policy import Policy
from varjax.policies import capacities
from varjax.policies.registry import POLICIES, get_policy, load_module, names, register
from varjax.policies.scale_rule import ScaleRule
from varjax.policies.token_rule import StagedPolicy, TokenRule
from varjax.policies.windows import Full, SlidingWindow, Streaming

from varjax.policies.headkv import HeadKV  # isort: skip
from varjax.policies.table import Table  # isort: skip
from varjax.policies.heatkv import BinaryHeatKV, HeatKV, HeatKVNaive  # isort: skip
from varjax.policies.knapsack import Knapsack  # isort: skip
from varjax.policies.learned import Learned  # isort: skip
from varjax.policies.snapkv import SnapKV  # isort: skip
from varjax.policies.h2o import H2O  # isort: skip
from varjax.policies.scalekv import ScaleKV  # isort: skip
from varjax.policies.hack import HACK  # isort: skip
from varjax.policies.amskv import AMSKV  # isort: skip
from varjax.policies.compose import Compose  # isort: skip
from varjax.policies.linear import LineAR  # isort: skip
from varjax.policies.rkv import RKV  # isort: skip
from varjax.policies.diagonal import Diagonal  # isort: skip

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

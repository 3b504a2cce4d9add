"""The core: caches of static shape, policies that are functions of masks, and the loops that draw.
README.md beside this file says in which order to read it. It imports nothing else of varjax."""

from varjax.core import masks
from varjax.core.allocation import Geometry, RegionAllocation, StageAllocation, StaticAllocation
from varjax.core.drawing import Inputs, decode
from varjax.core.next_scale import NextScaleTransformer
from varjax.core.next_token import NextTokenTransformer
from varjax.core.observation import Needs, Observation
from varjax.core.planner import plan_cache
from varjax.core.policy import Policy, Rule
from varjax.core.sampling import Sampling, Scores
from varjax.core.scales import ScaleSpec
from varjax.core.segments import plan_segments
from varjax.core.sequence import SCALES, TOKENS, Schedule, TokenSequence
from varjax.core.step import cache_step
from varjax.core.tokens import TokenSpec, token_step

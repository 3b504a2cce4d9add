"""CachePlan: everything about the cache that is decided on the host, before anything is compiled.

The bytes of the pool are computed here, and XLA allocates exactly these. With `accounting="bytes"`
(default) rounding to blocks is charged to the budget, so pool bytes <= budget * dense bytes. With
`accounting="tokens"` tokens are counted as the papers do, and the plan says by how much the rounded
pool exceeds the budget.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from varjax.core import arguments
from varjax.core.allocation import Allocation, Geometry, StageAllocation
from varjax.core.errors import UserError
from varjax.core.policy import Policy, Rule

KV_DTYPES = ("bfloat16", "float32", "int8")  # of stored keys and values


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class CachePlan:
    """The pool and its bytes, and what everybody asks a plan, whichever way its model draws.

    Immutable; equal and hashed by content. A model that draws scale by scale has a
    `scale_plan.ScalePlan`, one that draws token by token a `stages.TokenPlan`. Both add

    whole_because: why heads cannot lie on several devices, as the end of a sentence about the
      policy, with what to do instead; None if they can.
    static_content: whether the contents are known before the program starts.
    chooses: whether the device ever has to choose which tokens stay.
    live_tokens: int64 [K, L], tokens in the whole cache (one row) right after layer l of scale or
      stage s has stored. used_slots: slots in use then, counted in whole blocks.
    empty_state(batch_size, dtype, compute_dtype, groups): an empty cache for a batch of images, its
      pool in `dtype` (int8 comes with scales), queries and keys that attention sees in
      `compute_dtype`; the caches of `groups` devices, each with a group of heads, side by side.
    kv_arrays(state): the arrays of a cache that hold K and V, and the scales of an int8 pool.
    divide(groups): a plan for each of several groups of heads, all with pools of one size.
    arrays(): what `experiments.plan --save` writes beside sizes and capacities.
    _decided(): the arrays that the compiled program reads or depends on.

    allocation: who may hold how much. Each kind of plan has its own kinds of allocation.
    capacity: int32 [K, L, N], tokens held when scale (or stage) s starts.
    policy: the policy that was planned for, with what its calibration decides filled in.
    """

    geometry: Geometry
    allocation: Allocation | StageAllocation
    block_size: int
    pool_blocks: int
    capacity: np.ndarray
    policy: Policy

    @cached_property
    def rule(self) -> Rule:
        """The policy's rule for this kind of model."""
        return self.policy.rule(self.geometry.kind)

    budget = property(attrgetter("policy.budget"))
    accounting = property(attrgetter("policy.accounting"))

    # --- sizes ------------------------------------------------------------------------------------

    @property
    def pool_tokens(self) -> int:
        """Slots of the pool, per row."""
        return self.pool_blocks * self.block_size

    def num_bytes(self, batch_size: int, dtype) -> int:
        """Bytes of the pool for a batch of images (all rows). int8 includes the scales: one float32
        for the key and one for the value of every slot.

        Raises:
          UserError: a type that is not in `KV_DTYPES`, or a batch that is no positive number.
        """
        return self.pool_tokens * self._bytes_per_token(batch_size, dtype)

    def allocated_bytes(self, batch_size: int, dtype, groups: int = 1) -> int:
        """Bytes of the pools of all devices together where heads are divided over `groups` of
        them: one program serves all, so each pool has the size of the fullest."""
        return groups * self.divide(groups)[0].num_bytes(batch_size, dtype)

    def dense_bytes(self, batch_size: int, dtype) -> int:
        """Bytes of the full cache (last scale excluded) for a batch of images."""
        return self.geometry.dense_tokens * self._bytes_per_token(batch_size, dtype)

    def _bytes_per_token(self, batch_size: int, dtype) -> int:
        g, dtype = self.geometry, arguments.dtype("dtype", dtype, KV_DTYPES)
        batch_size = arguments.integer("batch_size", batch_size, 1, arguments.LARGEST_BATCH)
        # One scale for the key and one for the value of a slot. A scale per block would save bytes,
        # but writing a token would then change what its neighbours in the block mean.
        scales = 2 * 4 if dtype == "int8" else 0
        per_row = 2 * g.head_dim * jnp.dtype(dtype).itemsize + scales
        return batch_size * g.rows_per_image * per_row

    # Tokens of a head that a query reads at most, where that is less than what is stored; in words.
    read_tokens = reads = None

    def policy_inputs(self, image_index: np.ndarray) -> PyTree[np.ndarray]:
        """Returns what the policy knows beforehand about a batch of images, or None."""
        # tables say everything then: the policy is not asked again
        if self.static_content:
            return None
        return self.rule.inputs(self.geometry, self.allocation, image_index)

    # --- for people -------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return "\n".join(f"{name:9s} {value}" for name, value in self.facts().items())

    def facts(self) -> dict[str, str]:
        """Name, sizes and bytes of the plan."""
        g, name = self.geometry, self.policy.name
        per_image = {dtype: self.num_bytes(1, dtype) for dtype in ("bfloat16", "float32")}
        contents = f"contents {'known beforehand' if self.static_content else 'decided per image'}"
        return {
            "plan": f"{name}, budget {self.budget:g}, accounting {self.accounting}, {contents}",
            "model": f"{g.num_layers} layers, {g.heads}; {g.schedule.outline()}",
            "pool": f"{self.pool_blocks} blocks of {self.block_size} slots = {self.pool_tokens} "
            f"tokens, {self.fraction:.2%} of a full cache ({g.dense_tokens} tokens)",
            "peak": f"{self.peak_live_fraction:.2%} of a full cache is live at most",
            "bytes": ", ".join(f"{size} in {dtype}" for dtype, size in per_image.items())
            + f" for an image ({g.rows_per_image} rows)",
        }

    @property
    def peak_live_fraction(self) -> float:
        """Largest number of live tokens at any time, as a fraction of the full cache."""
        # a model of one scale stores nothing, so its full cache has no tokens
        return float(self.live_tokens.max() / max(1, self.geometry.dense_tokens))

    @property
    def fraction(self) -> float:
        """Slots of the pool as a fraction of the full cache."""
        return self.pool_tokens / max(1, self.geometry.dense_tokens)

    # --- identity ---------------------------------------------------------------------------------

    @cached_property
    def digest(self) -> str:
        # Hashed is what the compiled program reads, not how it came about: an interrupted run or
        # sweep may go on with a plan that was made in another way but is the same.
        h = hashlib.sha256(
            repr((self.geometry, self.block_size, self.pool_blocks, self.accounting)).encode()
        )
        for array in self._decided():
            h.update(b"-" if array is None else np.ascontiguousarray(array, np.int32))
        return h.hexdigest()

    def __hash__(self):
        # by content: arrays have no hash, and equal plans share programs
        return hash(self.digest)

    def __eq__(self, other):
        return isinstance(other, CachePlan) and self.digest == other.digest


def check_block_size(block_size: int) -> int:
    """A block size that is a power of two from 1 to 128; `UserError` for others."""
    # GPU kernels take powers of two only, and table entries store slots of a block in uint8
    if block_size not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise UserError(
            f"block_size={block_size}: choose a power of two from 1 to 128, or 0 to let the "
            f"planner choose"
        )
    return block_size

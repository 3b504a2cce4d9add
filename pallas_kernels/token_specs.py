"""Arguments of token attention in the shapes of published models: for tests, ahead-of-time
compilation and the benchmark."""

import functools
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.cache_write.reference import encode
from pallas_kernels.token_attention.sight import Sight

PROTECTED = 3  # positions that `reach` hides from no head


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenArguments:
    """What `token_attention.attend` takes: slots in no order, of which some are empty. mass: None
    where sums are not asked for; `newest`, `reach` and `bias` come with it."""

    q: jax.Array
    pool: jax.Array
    position: jax.Array
    scale: jax.Array | None
    newest: jax.Array | None
    reach: jax.Array | None
    used: jax.Array | None
    bias: jax.Array | None
    mass: jax.Array | None
    weight: float = field(default=0.5, metadata=dict(static=True))

    @classmethod
    def of(
        cls,
        spec: ArgSpec,
        slots: int | None = None,
        *,
        sums: bool = True,
        shared: bool = False,
        used: int | None = None,
        poison: bool = True,
        seed: int = 0,
    ) -> "TokenArguments":
        """Rows, heads and types of a call.

        Args:
          slots: of a head; None takes those of the call's tables.
          sums: ask for all that the operation offers.
          shared: heads have their positions in common.
          used: slots that may hold something, the first ones; None: all, which is not told.
          poison: empty slots hold NaN; int8: their scales do.
        """
        rng = np.random.default_rng(seed)
        slots = slots or spec.entries * spec.block_size
        heads, lines = (spec.rows, spec.heads), (spec.rows, 1 if shared else spec.heads)

        def normal(*shape):
            return rng.standard_normal(shape, np.float32)

        position = rng.permuted(np.broadcast_to(np.arange(slots), (*lines, slots)), axis=-1)
        position = np.where(rng.random(position.shape) < 0.2, -1, position)
        position[..., used or slots :] = -1
        position[..., 0] = 0  # every head sees a slot, whatever is hidden
        k, v = (normal(*heads, slots, spec.head_dim) for _ in range(2))
        pool, scale = _pool(k, v, spec.pool_dtype)
        # as many positions are hidden for being new as for being old
        newest = slots - 1 - slots // 8
        reach = jnp.asarray(rng.integers(1, newest + 2, heads), jnp.int32)
        found = cls(
            q=jnp.asarray(2 * spec.head_dim**-0.5 * normal(*heads, spec.head_dim), spec.dtype),
            pool=pool,
            position=jnp.asarray(position, jnp.int32),
            scale=scale,
            newest=jnp.int32(newest) if sums else None,
            reach=reach if sums else None,
            used=None if used is None else jnp.int32(used),
            bias=jnp.asarray(normal(spec.rows)) if sums else None,
            mass=jnp.asarray(np.abs(normal(*heads, slots))) if sums else None,
        )
        return found._poisoned() if poison else found

    @classmethod
    def abstract(cls, spec: ArgSpec, *args, sharding=None, **options) -> "TokenArguments":
        """Shapes and types only."""
        small = replace(spec, rows=1)
        found = cls.of(small, *args, poison=False, **options)

        def shape(a):
            sizes = (spec.rows, *a.shape[1:]) if a.shape else ()
            return jax.ShapeDtypeStruct(sizes, a.dtype, sharding=sharding)

        return jax.tree.map(shape, found)

    def in_float32(self) -> "TokenArguments":
        exact = self.q.astype(jnp.float32)
        if self.scale is not None:
            return replace(self, q=exact)
        return replace(self, q=exact, pool=self.pool.astype(jnp.float32))

    def given_to(self, attend, **options) -> tuple[jax.Array, jax.Array | None]:
        """Call `attend` of a module, with these arguments by position."""
        sight = Sight(self.newest, self.reach, self.used, PROTECTED)
        given = (self.q, self.pool, self.position, sight, self.bias, self.scale)
        return attend(*given, self.mass, self.weight, **options)

    def stored_by(self, store_and_attend, k, v, slot, **options) -> tuple:
        """Likewise, with a token to store."""

        def run(q, *rest, **options):
            return store_and_attend(q, k, v, slot, *rest, **options)

        return self.given_to(run, **options)

    def with_token(self, slot: int) -> "TokenArguments":
        """With the position of a token to store in its slot, which holds NaN as yet."""
        position = self.position.at[:, :, slot].set(0 if self.newest is None else self.newest)
        if self.scale is not None:
            return replace(self, position=position, scale=self.scale.at[..., slot].set(jnp.nan))
        return replace(self, position=position, pool=self.pool.at[:, :, slot].set(jnp.nan))

    def given_to_api(self, attend, **options) -> tuple[jax.Array, jax.Array | None]:
        """Likewise by name."""
        return attend(
            *(self.q, self.pool, self.position),
            newest=self.newest,
            reach=self.reach,
            used=self.used,
            protected=PROTECTED,
            first_bias=self.bias,
            pool_scale=self.scale,
            mass=self.mass,
            mass_weight=self.weight,
            **options,
        )

    def _poisoned(self) -> "TokenArguments":
        if self.scale is not None:
            return replace(self, scale=_nan_where_empty(self.position[:, None], self.scale))
        return replace(self, pool=_nan_where_empty(self.position[..., None], self.pool))


@functools.partial(jax.jit, static_argnums=2)
def _pool(k, v, dtype):
    """Both in one array, and their scales where it is int8."""
    pool, scale = encode(k, v, dtype)
    return pool, None if scale is None else jnp.moveaxis(scale, -1, 1)


@jax.jit
def _nan_where_empty(position, array):
    return jnp.where(position < 0, jnp.nan, array)

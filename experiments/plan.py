"""Print a policy's cache plan for a model, without weights.

    python -m experiments.plan --model=var-d30 --policy=streaming --budget=0.1 --batch_size=8
    python -m experiments.plan --policy=headkv --budget=0.3 --save=PLAN.npz \\
        --geometry='layers=32,heads=16,head_dim=128,schedule=1x1;2x2;3x4'

Shows tokens held per scale, the size of the pool, and how full the cache is after every layer. The
lines "papers" count as the published tables of AMS-KV and HeatKV do, which our bytes differ from:
6 bytes for an element of K and one of V together (float32 keys, 16-bit values), both guidance rows.
AMS-KV: GB of 1000 MiB; the full cache has the last scale, the compressed one what its sizes allow
in the end (what the last scale sees, for other policies). HeatKV: MiB, no last scale; the most that
is live at any time, what the budget allows, and the nearest row of its table. A published model
needs no --calibration here: layers and heads then count as alike.
--save writes the arrays: `capacity` int (K, layers, heads), tokens held when a scale starts;
`live_tokens` int (K, layers), tokens in the whole cache of one row right after a layer has stored;
`pool_tokens`, `num_bytes`, `dense_bytes`; for policies whose contents are known beforehand
`keep_scale` bool (K, layers, heads, K), whether a scale sees anything of an earlier one, and
`keep_count`, of how many of its tokens.
Models that draw token by token are given as --geometry='layers=36,heads=20,head_dim=64,tokens=576,
condition=1,line=24': image tokens, slots of the condition (1), tokens of an image line (by default
the image is a square); queries_per_head=8: so many query heads share each of the heads. Stages take
the place of scales, stage 0 is the condition; one is printed where what heads hold begins to grow,
drops or stays. --save writes `stages`, their first tokens.
For LlamaGen-XL and XXL of 384 pixels, Janus-Pro and Lumina-mGPT "papers" are the rows of HeadKV's
and LineAR's tables at the nearest budget: memory in all (GiB on a GPU), how much less that is than
their full cache's, which is what our bytes can be compared with, and what the totals are made of:
keys and values as the original stores them (Lumina-mGPT: float32 keys, 6 bytes for K and V),
weights, and the rest (decoding, the framework). Texts' lengths are not printed: they are inferred.
Geometries have at most 64 scales and 4096 heads over all layers, 2**20 heads times the square of
the scales and 2**25 heads times tokens: then any plan takes seconds and about a GiB at most.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np

from experiments.budgets import Sizing
from experiments.flags.model import ModelFlags
from experiments.flags.policy import PolicyFlags, plan_remarks
from experiments.flags.program import batch_size_flag, dtype_flag, kv_dtype_flag
from experiments.output import FileFlags
from experiments.published import memory_lines
from pallas_kernels import chips
from varjax.cache.allocation import Geometry
from varjax.cache.plan import CachePlan
from varjax.cli import command_line
from varjax.cli.flags import CommandFlags
from varjax.engine import memory
from varjax.engine.memory import show_bytes
from varjax.errors import UserError
from varjax.model import Model
from varjax.sequence import SCALES
from varjax.storage.atomic import new_file

FLAGS = CommandFlags(
    "--model=var-d30 --policy=streaming --budget=0.1 --batch_size=8",
    "model policy budget kv_bytes batch_size target save",
)
MODEL = ModelFlags(FLAGS, published="Published name")
GEOMETRY = FLAGS.string(
    "geometry",
    None,
    "layers=32,heads=16,head_dim=128,schedule=1x1;2x2;3x4 (height x width), or in place of the "
    "schedule tokens=576,condition=1,line=24.",
)
POLICY = PolicyFlags(FLAGS)
BATCH_SIZE = batch_size_flag(FLAGS, 1, "Images per batch (two cache rows each with guidance).")
DTYPE = dtype_flag(FLAGS, "bfloat16", "keys and values, unless --kv_dtype says otherwise")
KV_DTYPE = kv_dtype_flag(FLAGS)
TARGET = FLAGS.string(
    "target", None, f"With --budget=fit: a chip, {', '.join(chips.CHIPS)}; default: this device."
)
SAVE = FileFlags(FLAGS, "save", "Write the plan's arrays to this npz file.")


def arrays(plan: CachePlan, batch_size: int, kv_dtype: str) -> dict[str, np.ndarray]:
    """Return the arrays that --save writes."""
    found = {
        "capacity": plan.capacity,
        "live_tokens": plan.live_tokens,
        "pool_tokens": np.int64(plan.pool_tokens),
        "num_bytes": np.int64(plan.num_bytes(batch_size, kv_dtype)),
        "dense_bytes": np.int64(plan.dense_bytes(batch_size, kv_dtype)),
        "block_size": np.int64(plan.block_size),
    }
    return found | plan.arrays()


def summary(
    name: str, plan: CachePlan, batch_size: int, kv_dtype: str, remarks: Sequence[str]
) -> str:
    """Return the printed plan. remarks: lines that only some policies have."""
    g = plan.geometry
    excess = plan.fraction - plan.budget
    scales = f"{g.schedule.num_scales} scales" if g.kind == SCALES else "token by token"
    if g.kind != SCALES:
        scales += f", condition of {g.schedule.condition}"
    held, full = plan.num_bytes(batch_size, kv_dtype), plan.dense_bytes(batch_size, kv_dtype)
    lines = [
        f"{name}: {g.num_layers} layers, {g.heads}, "
        f"{scales}, {g.schedule.total_tokens} tokens "
        f"({g.schedule.persistent_tokens} per head in a full cache)",
        f"policy {plan.policy.name}, budget {plan.budget:g}, accounting {plan.accounting}",
        f"pool      {plan.pool_blocks} blocks of {plan.block_size} slots = {plan.pool_tokens} "
        f"tokens, {plan.fraction:.2%} of full",
        f"bytes     {held} ({show_bytes(held)}) of {full} ({show_bytes(full)}), batch "
        f"{batch_size}, {kv_dtype}",
        f"peak      {plan.peak_live_fraction:.2%} of full is live at most",
    ]
    if excess > 1e-9:
        lines.append(
            f"rounding  the pool exceeds the budget by {excess:.2%} of full (accounting=bytes "
            f"would charge this to the budget)"
        )
    return "\n".join([*lines, *remarks, "", *plan.timeline()])


def check_countable(geometry: Geometry, batch_size: int, dtype: str) -> None:
    """Raise `UserError` if 64 bits may not hold the bytes of a batch (blocks may be padded)."""
    row = geometry.dense_tokens * 2 * geometry.head_dim * jnp.dtype(dtype).itemsize
    needed = batch_size * geometry.rows_per_image * row
    if needed > np.iinfo(np.int64).max // 2:
        raise UserError(
            f"a batch of {batch_size} needs {show_bytes(needed)}, more than can be counted in 64 "
            f"bits: lower --batch_size or the sizes in --geometry"
        )


def _sizing(model: Model | Geometry, batch_size: int, dtype: str, kv_dtype: str) -> Sizing:
    """Return what bytes of a cache mean on --target, or on this device."""
    sizing = Sizing(batch_size=batch_size, kv_dtype=kv_dtype)
    if not isinstance(model, Model):
        return sizing  # a geometry has no weights, so that nothing can be predicted
    kernels, platform = None, None
    if TARGET.value:
        try:
            chip = chips.get_chip(TARGET.value)
        except ValueError as error:
            raise UserError(f"--target={TARGET.value}: {error}") from None
        kernels, platform = True, chip.platform
        sizing = replace(sizing, available=chip.memory, device=chip.name)
    else:
        sizing = replace(sizing, available=memory.available_bytes())
    how = {"kernels": kernels, "platform": platform}
    predict = partial(memory.predict, model, dtype=dtype, kv_dtype=kv_dtype, **how)
    return replace(sizing, predict=lambda plan: predict(plan=plan, batch_size=batch_size).total)


def main(argv: list[str]) -> None:
    target = SAVE.check()
    MODEL.check_alone(GEOMETRY)
    if TARGET.present and not POLICY.is_fitted:
        raise UserError("--target belongs to --budget=fit: leave it out")
    if GEOMETRY.value:
        name, model = "geometry", Geometry.parse(GEOMETRY.value)
        geometry = model
    else:
        model = MODEL.resolve(weights=False)
        name, geometry = model.name, model.geometry
    batch_size, dtype = BATCH_SIZE.value, DTYPE.value
    kv_dtype = KV_DTYPE.value or dtype
    check_countable(geometry, batch_size, dtype)
    sizing = partial(_sizing, model, batch_size, dtype, kv_dtype)
    policy, of_budget = POLICY.sized(POLICY.resolve(), model, None, sizing)
    plan, calibration = POLICY.plan(policy, model)
    steady = plan.rule.steady_tokens(geometry)
    remarks = of_budget + plan_remarks(plan, calibration)
    remarks += memory_lines(plan, batch_size, kv_dtype, steady)
    print(summary(name, plan, batch_size, kv_dtype, remarks))
    if target:
        with new_file(target) as file:
            np.savez(file, **arrays(plan, batch_size, kv_dtype))


if __name__ == "__main__":
    command_line.run(main)

"""The cost of drawing an image token, for models that draw token by token, and the least possible.

    floor = max(weights / bandwidth, 2 parameters rows / peak rate) + slots read / bandwidth

Weights and attention follow each other, so their times add up. Weights are those of the layers and
of the head, which every token meets. There are two rows per image with guidance. A token reads K
and V of slots: of those in use, on average over all tokens, where contents are known beforehand
(`full`, `swa`, `streaming`); of all slots of a head where a policy decides, because all are in use
once the cache is full. Activations, decisions and the starts of kernels are not counted.
"""

import jax

from experiments.aot.occupancy import used_slots
from experiments.aot.program import Compilation
from pallas_kernels.chips import Chip
from varjax.cache.stages import TokenPlan
from varjax.engine.cost import device_bytes
from varjax.nn import schemes
from varjax.nn.schemes import SCHEMES


def describe(case: Compilation) -> dict | None:
    """Costs per image token on one device, as content of a JSON file; None where a model draws by
    scales. Kernels and seconds are those of the whole program that draws codes, decisions and the
    condition included, divided by the image tokens."""
    workload, found = case.workload, case.codes.modelled
    plan = workload.plan
    if not isinstance(plan, TokenPlan):
        return None
    transformer = case.networks["transformer"]
    weights = jax.tree.leaves([getattr(transformer, n) for n in transformer.every_token])
    mesh, slots = workload.program.mesh, slots_read(plan)
    scheme = SCHEMES.get(workload.model.weights_dtype)
    per_slot = plan.num_bytes(case.batch_size, workload.program.kv_dtype) / plan.pool_tokens
    least = floor(
        case.chip,
        peak=scheme and schemes.peak(scheme, case.chip),
        weight_bytes=sum(map(device_bytes, weights)),
        parameters=sum(device_bytes(a) // a.dtype.itemsize for a in weights),
        rows=case.batch_size * plan.geometry.rows_per_image // mesh.data,
        cache_bytes=slots * plan.geometry.num_heads * per_slot / mesh.num_devices,
    )
    tokens = plan.sequence.image_tokens
    seconds, expected = found and found.seconds, found and found.expected_seconds
    return {
        "image_tokens": tokens,
        "slots_per_head": slots / plan.geometry.num_layers,
        "floor_s": least,
        "modelled_s": seconds and seconds / tokens,
        "expected_s": expected and expected / tokens,
        "over_floor": seconds and seconds / tokens / least,
        "kernels": found and found.calls() / tokens,
    }


def floor(
    chip: Chip,
    *,
    weight_bytes: float,
    parameters: float,
    rows: int,
    cache_bytes: float,
    peak: float | None = None,
) -> float:
    """The least seconds per token.

    Args:
      weight_bytes, parameters: of the layers and the head.
      rows: of the transformer.
      cache_bytes: what all rows read of the cache for a token.
      peak: FLOPs per second of the products; None: in bfloat16.
    """
    computing = 2 * parameters * rows / (peak or chip.bf16_flops)
    return max(weight_bytes / chip.bandwidth, computing) + cache_bytes / chip.bandwidth


def slots_read(plan: TokenPlan) -> float:
    """Slots that a token reads of one head, summed over all layers."""
    if not plan.static_content:
        return float(sum(plan.layer_slots))
    return float(used_slots(plan).sum(axis=-1).mean())


# --- to read ---


def _row(key: str, form: str, factor: float = 1.0):
    """A row that is empty where the number is missing or the model has no time."""

    def found(r) -> str:
        each = r.get("per_token") or {}
        known = None not in (each.get("modelled_s"), each.get(key))
        return f"{factor * each[key]:{form}}" if known else ""

    return found


ROWS = (
    ("per token, ms", _row("modelled_s", ".3g", 1e3)),
    ("  expected", _row("expected_s", ".3g", 1e3)),
    ("  floor", _row("floor_s", ".3g", 1e3)),
    ("  / floor", _row("over_floor", ".2f")),
    ("  kernels", _row("kernels", ".0f")),
)
LEGEND = """\
per token    of the program that draws codes. Its floor: max(weights / bandwidth, 2 parameters x
             rows / peak rate) + the slots that a token reads / bandwidth: those in use, on average,
             or all of a head where a policy decides which."""

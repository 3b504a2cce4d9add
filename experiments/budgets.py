"""Budgets as people think of them: bytes of the cache, or what fits a device. Both become the
fraction that policies take."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from varjax.core.errors import UserError
from varjax.core.plan import CachePlan
from varjax.generation import memory
from varjax.generation.memory import show_bytes
from varjax.policies import Policy

FIT = "fit"
UNITS = {"": 1, "B": 1, **{f"{u}iB": 1024**i for i, u in enumerate("KMGT", 1)}}
UNITS |= {f"{u}B": 1000**i for i, u in enumerate("KMGT", 1)}
STEPS = 12  # of the bisection: budgets are found to 1/4096


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """Sizes that turn bytes into a budget for a command.

    batch_size: images that share the cache's bytes, on all devices.
    kv_dtype: type of the stored cache.
    predict: bytes that a program with a plan takes on a device; None: nothing is predicted.
    available: bytes of the device; None: it does not say.
    device: its name, for messages.
    """

    batch_size: int
    kv_dtype: str
    predict: Callable[[CachePlan], int] | None = None
    available: int | None = None
    device: str = "this device"


def parse_bytes(text: str) -> int:
    """Read `"2GiB"`, `"512 MiB"`, `"1.5GB"`, `"4096"`. `UserError` for anything else."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    units = {unit.lower(): size for unit, size in UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise UserError(f"{text!r:.60} is no number of bytes: write 2GiB, 512MiB or 1.5GB")
    number = math.floor(float(match[1]) * units[match[2].lower()])
    if number < 1:
        raise UserError(f"{text!r:.60} is less than a byte: write 2GiB, 512MiB or 1.5GB")
    return number


def images_at_once(plan: CachePlan, dtype: str, wanted: int | None, most: int) -> int:
    """Return how many images' keys and values fit into so many bytes (None: any), at most `most`.
    `UserError` if not one does."""
    one = plan.num_bytes(1, dtype)
    count = most if wanted is None or not one else min(most, wanted // one)
    if count < 1:
        raise UserError(
            f"kv_bytes={show_bytes(wanted)} hold no image: one takes {show_bytes(one)} with this "
            f"policy and budget; give more, or take a smaller budget"
        )
    return count


def of_bytes(
    policy: Policy, wanted: int, plan_of: Callable[[Policy], CachePlan], sizing: Sizing
) -> Policy:
    """Return the policy with the largest budget whose pool has at most `wanted` bytes. `UserError`
    if the policy cannot work with so few, or takes no budget."""
    full = _full_bytes(policy, plan_of, sizing)
    fraction = min(1.0, wanted / full)
    said = f"{show_bytes(wanted)} are {fraction:.3%} of the full cache, {show_bytes(full)} for a "
    said += f"batch of {sizing.batch_size}"
    for _ in range(STEPS):
        sized = replace(policy, budget=fraction)
        try:
            held = plan_of(sized).num_bytes(sizing.batch_size, sizing.kv_dtype)
        except UserError as error:
            raise UserError(f"{said}: {error}") from None
        if held <= wanted:
            return sized
        # rounding is not charged to the budget (accounting=tokens)
        fraction *= min(0.999, wanted / held)
    raise UserError(f"{said}: no budget of {policy.name} takes so few, choose more")


def fitting(policy: Policy, plan_of: Callable[[Policy], CachePlan], sizing: Sizing) -> Policy:
    """Return the policy with the largest budget with which a batch fits the device; the full cache
    has one. `UserError` if none fits, the device does not say what it has, or the policy takes no
    budget."""
    if policy.name != "full":
        _full_bytes(policy, plan_of, sizing)
    if sizing.available is None or sizing.predict is None:
        raise UserError(f"{sizing.device} does not say how much memory it has: give a fraction")
    room = memory.SAFETY * sizing.available
    low, high, fraction, best, needed = 0.0, 1.0, 1.0, None, None
    for _ in range(STEPS + 1):
        sized = replace(policy, budget=fraction)
        try:
            total = sizing.predict(plan_of(sized))
        except UserError:  # too small for the policy
            low = fraction
        else:
            if total > room:
                high, needed = fraction, total
            else:
                best, low = sized, fraction
        if low == 1.0 or policy.name == "full":
            break
        fraction = (low + high) / 2
    if best is None:
        have = show_bytes(int(room))
        need = f" needs about {show_bytes(needed)}" if needed else ""
        small, way_out = " with the smallest", "lower --batch_size"
        what = f"no budget of {policy.name} fits"
        if policy.name == "full":
            what, small = "the full cache does not fit", ""
            way_out = f"choose a policy that keeps less, or {way_out}"
        raise UserError(
            f"{what}: a batch of {sizing.batch_size}{need}{small}, {sizing.device} has {have}: "
            f"{way_out}"
        )
    return best


def _full_bytes(policy: Policy, plan_of: Callable[[Policy], CachePlan], sizing: Sizing) -> int:
    """Return the bytes of the full cache, in the type of the pool."""
    if not policy.budgeted or policy.name == "full":
        raise UserError(f"policy {policy.name!r} takes no budget: choose a policy that has one")
    plan = plan_of(replace(policy, budget=1.0))
    return plan.dense_bytes(sizing.batch_size, sizing.kv_dtype)


def remark(policy: Policy, plan: CachePlan, sizing: Sizing) -> str:
    """A line that names the fraction."""
    held = plan.num_bytes(sizing.batch_size, sizing.kv_dtype)
    full = plan.dense_bytes(sizing.batch_size, sizing.kv_dtype)
    line = f"budget    {policy.budget:.4g} of the full cache: {show_bytes(held)} of "
    return f"{line}{show_bytes(full)}, batch {sizing.batch_size}, {sizing.device}"

"""Where a model fits: chips, meshes and the largest batches, predicted without compiling."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from experiments.generation import ProgramOptions
from pallas_kernels import chips
from pallas_kernels.chips import Chip
from varjax.core import arguments
from varjax.core.errors import UserError
from varjax.core.plan import CachePlan
from varjax.generation import memory, sharding, weights
from varjax.generation.memory import Prediction, show_bytes
from varjax.generation.mesh import MeshSpec
from varjax.models.model import Model

GROWTH = 1.5


def read_chips(text: str) -> tuple[Chip, int]:
    """Read "h100" or "tpu-v5e:8" as (chip, devices). `UserError` for an unknown chip, and for a
    number of devices that it is not offered with."""
    name, colon, number = text.strip().partition(":")
    try:
        chip = chips.get_chip(name)
    except ValueError as error:
        raise UserError(str(error)) from None
    digits = number.isascii() and number.isdecimal() and len(number) < 8
    if colon and not (digits and 1 <= int(number) <= chip.most_devices):
        most = f"1 to {chip.most_devices}, as {chip.name}:8"
        raise UserError(f"{number!r:.20} is no number of devices of {chip.name}: write {most}")
    return chip, int(number) if colon else 1


def largest(
    model: Model,
    plan_of: Callable[[int], CachePlan],
    program: ProgramOptions,
    text: int | None,
    where: tuple[Chip, int],
) -> tuple[int, MeshSpec] | None:
    """Find the largest batch that is predicted to fit, and its mesh; None if not even an image
    fits. Devices along `model` exchange sums in every layer, so there are more of them only for
    `GROWTH` times as many images.

    plan_of: from devices along `model`. text: padded length of texts, None for the most. where: as
      `read_chips` returns it.
    """
    (chip, total), best = where, None
    for groups in (n for n in range(1, total + 1) if total % n == 0):
        mesh = MeshSpec(data=total // groups, model=groups)
        low, most = 0, int(GROWTH * best[0]) // mesh.data + 1 if best else 1
        with contextlib.suppress(UserError):  # cannot be divided like that
            heads = model.config.num_heads
            mesh.check(batch_size=mesh.data, num_heads=heads, available=total, where=chip.name)
            weights.check_weights(model.networks, mesh)
            plan = plan_of(groups)
            sharding.check_plan(plan, mesh)
            part, alone = plan.divide(groups)[0], replace(program, mesh=MeshSpec())
            need = partial(alone.predict_on, chip, model, part, text)
            while most < arguments.LARGEST_BATCH and fits(need(most), chip):
                low, most = most, 8 * most  # `low` fits, up to `most` is looked at
            if low:
                most = min(most, arguments.LARGEST_BATCH)
                best = memory.largest_batch(need, most, chip.usable) * mesh.data, mesh
    return best


def fits(need: Prediction, chip: Chip) -> bool:
    """Whether a prediction leaves the chip enough room."""
    return need.total <= memory.SAFETY * chip.usable


def verdict(need: Prediction, mesh: MeshSpec, chip: Chip | None) -> str:
    """A line about what a device has to hold, and whether it can, if the chip is known."""
    many = f"each of {mesh.num_devices} devices ({mesh}): " if mesh.num_devices > 1 else ""
    said = ""
    if chip is not None:
        room = f"of which predictions may fill {show_bytes(int(memory.SAFETY * chip.usable))}"
        said = f": {'fits' if fits(need, chip) else 'DOES NOT FIT'} {chip.name}, {room}"
    return f"device    {many}{need}{said}"

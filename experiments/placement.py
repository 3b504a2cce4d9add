"""Where a model fits: devices of chips, meshes and the largest batches, predicted without compiling
anything."""

import contextlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from experiments.generation import ProgramOptions
from pallas_kernels import chips, implementations
from pallas_kernels.chips import Chip
from varjax.core import arguments
from varjax.core.errors import UserError
from varjax.core.plan import CachePlan
from varjax.generation import memory, sharding, weights
from varjax.generation.memory import Prediction, show_bytes
from varjax.generation.mesh import MeshSpec
from varjax.models.model import Model

GROWTH = 1.5
OF_POLICIES = ("policy_args", "calibration", "learned")  # flags that the full cache does not take


@dataclass(frozen=True)
class Place:
    """So many devices of a chip."""

    chip: Chip
    devices: int = 1

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Read "h100" or "tpu-v5e:8". `UserError` for an unknown chip, and for a number of devices
        that it is not offered with."""
        name, colon, number = text.strip().partition(":")
        try:
            chip = chips.get_chip(name)
        except ValueError as error:
            raise UserError(str(error)) from None
        digits = number.isascii() and number.isdecimal() and len(number) < 8
        if colon and not (digits and 1 <= int(number) <= chip.most_devices):
            raise UserError(
                f"{number!r:.20} is no number of devices of {chip.name}: write 1 to "
                f"{chip.most_devices}, as {chip.name}:8"
            )
        return cls(chip, int(number) if colon else 1)

    def __str__(self) -> str:
        return self.chip.name + f":{self.devices}" * (self.devices > 1)


@dataclass(frozen=True)
class Fit:
    """The largest batch that is predicted to fit, and its mesh."""

    batch: int
    mesh: MeshSpec


def predict(
    model: Model,
    plan: CachePlan,
    program: ProgramOptions,
    batch_size: int,
    *,
    chip: Chip | None,
    text: int | None,
) -> Prediction:
    """Predict the bytes of one device. batch_size: its images. chip: None is this machine. text:
    padded length of texts, None for the most."""
    best, platform = implementations.preferred(), None
    if chip is not None:
        platform = chip.platform
        best = implementations.choices(platform, chip.capability)[0]
    kernels = program.has_kernel(plan, best)
    return program.predict(model, plan, batch_size, text, kernels, platform=platform)


@dataclass(frozen=True, eq=False)
class Case:
    """A model with a policy. plan_of: from devices along `model`; often called with the same
    number. text: as of `predict`."""

    model: Model
    plan_of: Callable[[int], CachePlan]
    text: int | None

    def largest(self, place: Place, program: ProgramOptions) -> Fit | None:
        """Find the largest batch; None if not even an image fits. Devices along `model` exchange
        sums in every layer, so there are more of them only for `GROWTH` times as many images."""
        best, total = None, place.devices
        for groups in (n for n in range(1, total + 1) if total % n == 0):
            mesh = MeshSpec(data=total // groups, model=groups)
            least = int(GROWTH * best.batch) // mesh.data + 1 if best else 1
            with contextlib.suppress(UserError):  # cannot be divided like that
                if each := self._on_each(mesh, place.chip, program, least):
                    best = Fit(each * mesh.data, mesh)
        return best

    def _on_each(self, mesh: MeshSpec, chip: Chip, program: ProgramOptions, least: int) -> int:
        """Return how many images fit every device along `data`; 0 if not even `least` do.
        `UserError` if the model or the policy cannot be divided over the mesh."""
        heads, devices = self.model.config.num_heads, mesh.num_devices
        mesh.check(batch_size=mesh.data, num_heads=heads, available=devices, where=chip.name)
        weights.check_weights(self.model.networks, mesh)
        plan = self.plan_of(mesh.model)
        sharding.check_plan(plan, mesh)
        part, alone = plan.divide(mesh.model)[0], replace(program, mesh=MeshSpec())
        need = partial(predict, self.model, part, alone, chip=chip, text=self.text)
        low, most = 0, least  # more than `low` is known to fit, up to `most` is looked at
        while most < arguments.LARGEST_BATCH and fits(need(most), chip):
            low, most = most, 8 * most
        most = min(most, arguments.LARGEST_BATCH)
        return memory.largest_batch(need, most, chip.usable) if low else 0


def fits(need: Prediction, chip: Chip) -> bool:
    """Whether a prediction leaves the chip enough room."""
    return need.total <= memory.SAFETY * chip.usable


def verdict(need: Prediction, mesh: MeshSpec, chip: Chip | None) -> str:
    """A line about what a device has to hold, and whether it can, if the chip is known."""
    many = f"each of {mesh.num_devices} devices ({mesh}): " if mesh.num_devices > 1 else ""
    line = f"device    {many}{need}"
    if chip is None:
        return line
    said, room = "fits" if fits(need, chip) else "DOES NOT FIT", memory.SAFETY * chip.usable
    return f"{line}: {said} {chip.name}, of which predictions may fill {show_bytes(int(room))}"


def report(
    cases: Mapping[str, Case],
    places: Sequence[Place],
    programs: Sequence[ProgramOptions],
    given: Mapping[str, object],
) -> str:
    """Return a table of the largest batches, and for every place the command that draws the last
    case that fits there.

    cases: {policy: case}, the full cache first. programs: of each place. given: {flag: value} that
      the commands have, too.
    """
    found, names, first = [], {}, programs[0]
    for policy, case in cases.items():
        budget = case.plan_of(1).budget
        names[policy] = policy if policy == "full" else f"{policy} {budget:g}"
        found.append([case.largest(*pair) for pair in zip(places, programs, strict=True)])
    types = f"weights {first.weights_dtype}, cache {first.kv_dtype}"
    model = next(iter(cases.values())).model
    lines = [f"{model.name}, {types}: images of the largest batch that is predicted to fit", ""]
    lines += [*table([["target", "memory", *names.values()], *map(_cells, places, *found)]), ""]
    for place, *fits in zip(places, *found, strict=True):
        best = {policy: fit for policy, fit in zip(names, fits, strict=True) if fit}
        if best:
            policy, fit = best.popitem()
            said = command(model, place, fit, {**given, "policy": policy})
            lines += [f"{place}, {names[policy]}:", f"  {said}"]
    return "\n".join(lines)


def _cells(place: Place, *fits: Fit | None) -> list[str]:
    several = place.devices > 1
    said = [f"{f.batch} ({f.mesh})" if f and several else f and str(f.batch) for f in fits]
    return [str(place), show_bytes(place.chip.memory), *(cell or "-" for cell in said)]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the cells of every column below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def command(model: Model, place: Place, fit: Fit, given: Mapping[str, object]) -> str:
    """Return the command that draws a batch there; of several hosts, that of every host."""
    of_policy = OF_POLICIES if given["policy"] == "full" else ()
    flags = {name: value for name, value in given.items() if name not in of_policy}
    flags["batch_size"] = fit.batch
    flags |= {"num_images": fit.batch} if model.num_classes else {"prompts": "FILE.txt"}
    if place.devices > 1:
        flags["mesh"] = fit.mesh
    if place.devices > place.chip.host_devices:
        flags["distributed"] = "auto"
    written = shlex.join(f"--{name}={value}" for name, value in flags.items())
    return f"{place.chip.environment}python -m experiments.run {written}"

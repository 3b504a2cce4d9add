"""The steps of `experiments.bench --machine`, in their order.

Wrong numbers are looked for first, because times of wrong kernels mean nothing. Then comes what
settles how attention spends its time, tiles (which later steps use), times of operations, programs.
What matters less comes last, since a deadline may end the list.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from experiments.bench import kernel_steps, program_steps, sanitizer
from experiments.bench.rows import Found
from experiments.bench.scope import MODELS, Scope, model_of
from pallas_kernels import bench
from pallas_kernels.ragged_attention import tune
from varjax.errors import choose

# in which a case of a check is compiled and run: on a chip, and interpreted on a busy machine
CASE_SECONDS, INTERPRETED_SECONDS = 180.0, 900.0
POLICIES = ("full", "streaming")  # the second keeps a share, known beforehand


@dataclass(frozen=True)
class Step:
    """A part of the run that is kept once it is finished.

    name: letters, digits, "-" and "_".
    run: does it. It raises `kernel_steps.WrongResult` if a number is wrong.
    limit: seconds after which it is taken to hang; of checks those of one case.
    checks: whether it looks for wrong numbers only: then a failure ends the run, too, and `run`
      takes `notify` (`kernel_steps.check`).
    """

    name: str
    run: Callable[..., Found]
    limit: float = 420.0
    checks: bool = False


def listed(scope: Scope) -> list[Step]:
    """All steps for a machine."""
    first = [name for name in scope.kernels if scope.small or name == scope.best]
    steps = [*_sanitizer(scope), *_checks(scope, first)]
    steps.append(Step("slope", partial(kernel_steps.slope, scope)))
    steps += [*_tiles(scope, "attend")]
    steps += [
        Step(f"time-{operation}", partial(kernel_steps.time, scope, operation))
        for operation in scope.timed
    ]
    steps.append(Step("starts", partial(program_steps.start_times, scope)))
    steps += [
        Step(f"products-{name}", partial(program_steps.product_times, scope, name))
        for name in scope.models()
    ]
    steps += _draws(scope, POLICIES[0])
    if not scope.quick:
        steps += [
            Step(f"decoder-{name}", partial(program_steps.decoder_times, scope, name))
            for name in scope.models()
        ]
        steps += _draws(scope, POLICIES[1])
        steps += _tiles(scope, "attention_moments")
    # kernels that run by name only
    return [*steps, *_checks(scope, [name for name in scope.kernels if name not in first])]


def named(scope: Scope, name: str) -> Step:
    """The step of that name; `UserError` with the list of steps if there is none."""
    found = {step.name: step for step in listed(scope)}
    return found[choose("step", name, found)]


def _sanitizer(scope: Scope) -> Iterator[Step]:
    if "mosaic" in scope.kernels and sanitizer.available() and not scope.quick:
        yield Step("sanitizer", sanitizer.check, sanitizer.SECONDS + 60, checks=True)


def _checks(scope: Scope, kernels: Sequence[str]) -> Iterator[Step]:
    for operation in scope.checked:
        for kernel in kernels:
            if not bench.OPERATIONS[operation].has(kernel):
                continue
            run = partial(kernel_steps.check, scope, operation, kernel)
            if any(True for _ in kernel_steps.cases(scope, operation, kernel)):
                limit = INTERPRETED_SECONDS if scope.small else CASE_SECONDS
                yield Step(f"check-{operation}-{kernel}", run, limit, checks=True)


def _tiles(scope: Scope, operation: str) -> Iterator[Step]:
    """Tiles of one kernel at the shapes of the models that are drawn; interpreted, of one call."""
    kernel = scope.kernels[0] if scope.small else scope.best
    if kernel.removesuffix("-interpret") not in tune.CHOICES or scope.quick and not scope.small:
        return
    names = [n for n in scope.shapes if model_of(n) in MODELS[:2]]
    for shape in names[:1] if scope.small else names:
        run = partial(kernel_steps.tiles, scope, operation, shape, kernel)
        yield Step(f"tune-{operation}-{shape}", run)


def _draws(scope: Scope, policy: str) -> Iterator[Step]:
    for images in scope.images:
        for name in scope.models():
            step = f"draw-{name}-{policy}-{images}"
            run = partial(program_steps.draw, scope, name, policy, images, step)
            yield Step(step, run, limit=600.0)

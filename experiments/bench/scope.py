"""What `experiments.bench --machine` does on a machine: kernels, shapes, models, batches.

On a chip everything has its published size. On a CPU the same steps run with interpreters on small
shapes, and with small models: that shows that the steps work, and its times mean nothing.
"""

from dataclasses import dataclass

import jax

from experiments.bench import device
from pallas_kernels import arg_specs, implementations
from pallas_kernels.chips import Chip

# those whose shapes are checked and timed, and whose codes and pixels are drawn
MODELS = ("var-d30", "infinity-2b", "llamagen-xl")
TIMED = ("attend", "finish", "write", "sample", "attend_token", "store_token", "attend_text")
CHECKED = (*TIMED, "store_and_attend", "attention_moments", "token_scores", "move_slots", "rank")
SMALL = ("var-d30-t1", "infinity-2b-t64", "llamagen-xl-t1")  # shapes that are cut down
SMALLEST = ("attend", "write", "attend_token")  # what interpreters do in seconds
QUICK = (MODELS[0], MODELS[2])


def model_of(shape: str) -> str:
    """The model of a published shape: "var-d30" of "var-d30-t256"."""
    return shape.rpartition("-t")[0]


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What is done here.

    small: whether shapes and models are cut down, and kernels interpreted.
    kernels: implementations that are checked. best: the one that is timed.
    dtype: of what is timed.
    shapes: published shapes that are checked.
    checked, timed: operations.
    types: (type, type of the pool or None) of each check.
    images: batches. share: of the cache, beside the full one.
    """

    small: bool
    quick: bool
    kernels: tuple[str, ...]
    best: str
    dtype: str
    shapes: tuple[str, ...]
    checked: tuple[str, ...]
    timed: tuple[str, ...]
    types: tuple[tuple[str, str | None], ...]
    images: tuple[int, ...]
    share: float
    chip: Chip | None = None

    @property
    def repeats(self) -> int:
        """Timed loops of an operation, and runs of a program."""
        return 1 if self.small else 3 if self.quick else 5

    def models(self) -> tuple[str, ...]:
        """Models whose codes and pixels are drawn."""
        return MODELS[:1] if self.quick else MODELS

    def timed_shapes(self) -> list[str]:
        """Shapes whose times are taken: those of `MODELS`, or the last one of each."""
        found: dict[str, list[str]] = {}
        for shape in self.shapes:
            found.setdefault(model_of(shape), []).append(shape)
        last = -1 if self.quick else 0
        return [shape for name in MODELS for shape in found.get(name, [])[last:]]


def here(quick: bool) -> Scope:
    """What is done on the default device."""
    return _interpreted(quick) if jax.default_backend() == "cpu" else _on_chip(quick)


def _on_chip(quick: bool) -> Scope:
    best = implementations.preferred()
    kernels = [n for n in implementations.PLATFORMS if implementations.why_not_here(n) is None]
    types = (("bfloat16", None), ("bfloat16", "int8"), ("float32", None))
    return Scope(
        small=False,
        quick=quick,
        kernels=(best,) if quick else tuple(kernels),
        best=best,
        dtype="bfloat16",
        shapes=_shapes(QUICK) if quick else tuple(arg_specs.SPECS),
        checked=TIMED[:6] if quick else CHECKED,
        timed=TIMED[:6] if quick else TIMED,
        types=types[:1] if quick else types,
        images=(1, 8) if quick else (1, 8, 64),
        share=0.1,
        chip=device.chip(),
    )


def _interpreted(quick: bool) -> Scope:
    names = (name + implementations.SUFFIX for name in implementations.PLATFORMS)
    kernels = [n for n in names if implementations.why_not_here(n) is None]
    if quick:  # the simulator of GPUs takes most of the time
        kernels = [n for n in kernels if not n.startswith("mosaic")]
    return Scope(
        small=True,
        quick=quick,
        kernels=tuple(kernels),
        best="reference",
        dtype="float32",
        shapes=SMALL[::2] if quick else SMALL,
        checked=SMALLEST if quick else CHECKED,
        timed=SMALLEST if quick else TIMED,
        types=(("bfloat16", None),),  # the one that all kernels take
        images=(1,) if quick else (1, 2),
        share=0.25,
        chip=device.chip(),
    )


def _shapes(models: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(n for n in arg_specs.SPECS if model_of(n) in models)

"""Which implementation of an operation runs: names, platforms, dispatch.

Every operation has a plain JAX `reference`, which defines what is correct and runs everywhere, and
Pallas kernels for GPU (`triton`; `mosaic` for Hopper) and TPU (`tpu`): modules that hold functions
of one name, listed by the operation in a dictionary. It holds functions that import the modules
when first called, because JAX may be installed without the other platform's backend. A kernel runs
on its own platform only; the names that end in `-interpret` run it step by step with JAX operations
anywhere, slowly, to check it.
"""

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import jax
import jax.numpy as jnp

PLATFORMS = {"mosaic": "gpu", "triton": "gpu", "tpu": "tpu"}
TRITON = "jax.experimental.pallas.triton"  # deprecated: some later JAX has none
HOPPER = "9.0"  # compute capability
SUFFIX = "-interpret"
NAMES = ("reference", *PLATFORMS, *(name + SUFFIX for name in PLATFORMS))
Modules = Mapping[str, Callable[[], ModuleType]]


def run(name: str | None, modules: Modules, function: str, *arguments, **options):
    """Call the implementation `name` of an operation's function.

    None takes the kernel of the default platform, and the reference where there is none or, with a
    warning, where it cannot take these arguments. A kernel's platform is not checked, because
    programs are also compiled for accelerators that are not there; see `why_not_here`.

    Raises:
      NotImplementedError: the implementation named does not exist or cannot take the arguments.
    """
    if name is None:
        try:
            name = preferred(jax.default_backend())
            return run(name, modules, function, *arguments, **options)
        except NotImplementedError as error:
            # level 3 is the caller of the operation's API function
            warnings.warn(f"the plain JAX reference runs instead: {error}", stacklevel=3)
            return run("reference", modules, function, *arguments, **options)
    if name not in NAMES:
        raise NotImplementedError(
            f"attention implementation {name!r} does not exist; available: {', '.join(NAMES)}"
        )
    kernel = name.removesuffix(SUFFIX)
    if kernel != "reference":
        options["interpret"] = name.endswith(SUFFIX)
    return getattr(modules[kernel](), function)(*arguments, **options)


def preferred(platform: str) -> str:
    """The implementation for "cpu", "gpu" or "tpu"."""
    if platform != "gpu":
        return {"tpu": "tpu"}.get(platform, "reference")
    if importlib.util.find_spec(TRITON):
        return "triton"
    return "mosaic" if _capability() == HOPPER else "reference"


def _capability() -> str | None:
    """Compute capability of this machine's GPU."""
    return getattr(jax.devices()[0], "compute_capability", None)


def why_not_here(name: str) -> str | None:
    """Why an implementation cannot run on this machine's default platform, or None."""
    wanted, found = PLATFORMS.get(name), jax.default_backend()
    if wanted not in (None, found):
        return f"{name} needs a {wanted.upper()}, this machine offers {found}"
    if name == "mosaic" and _capability() != HOPPER:
        return f"mosaic needs a GPU of compute capability {HOPPER}, this one has {_capability()}"
    if name == "triton" and not importlib.util.find_spec(TRITON):
        return f"this JAX ({jax.__version__}) has no Pallas-Triton"
    return None


def check_attention(
    name: str, q, kv_pool, kv_scale, *, head_dims: Sequence, block_sizes: Sequence, dtypes: Sequence
) -> None:
    """Raise `NotImplementedError` with the reason and a way out if the attention kernel `name`
    cannot take these arrays. `dtypes`: names of the pool's types that it takes."""
    way_out = "use implementation='reference' (--attention=reference)"
    other = f"plan with one of them (policy argument block_size) or {way_out}"
    for given, wanted, takes, hint in (
        (q.shape[-1], head_dims, "heads of {}", way_out),
        (kv_pool.shape[2], block_sizes, "blocks of {} slots", other),
        (kv_pool.dtype.name, dtypes, "a pool of {}", way_out),
    ):
        if given not in wanted:
            takes = takes.format(", ".join(map(str, wanted)))
            raise NotImplementedError(f"{name} attention takes {takes}, not {given}: {hint}")
    # No NotImplementedError, after which the reference would run: it cannot take these, either.
    if (kv_pool.dtype == jnp.int8) != (kv_scale is not None):
        raise ValueError("an int8 pool comes with kv_scale, and only that")

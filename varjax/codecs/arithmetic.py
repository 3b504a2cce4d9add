"""The arithmetic of a codec's decoder: the values of `decode_dtype`, and which a device offers.

| value | feature maps and weights | products and convolutions |
| --- | --- | --- |
| `bfloat16` | bfloat16 | of bfloat16, sums in float32 |
| `tf32` | float32 | of TF32 (10 bits of mantissa), sums in float32; NVIDIA GPUs from Ampere on |
| `float32` | float32 | of float32: no TF32, no bfloat16 passes |

Statistics of normalisation and softmax are float32 in each of them.
"""

import contextlib

import jax
import jax.numpy as jnp

from pallas_kernels import target
from varjax.core import arguments
from varjax.core.errors import UserError

AUTO = "auto"
BFLOAT16, TF32, FLOAT32 = DTYPES = ("bfloat16", "tf32", "float32")
CHOICES = (AUTO, *DTYPES)
AMPERE = 8  # first major compute capability whose tensor cores take TF32


def resolve(
    decode_dtype: object,
    platform: str | None = None,
    capability: str | None = None,
    machine: str = "this machine",
    name: str = "decode_dtype",
) -> str:
    """The one of `DTYPES` that a decoder runs in.

    Args:
      decode_dtype: one of `CHOICES`, or a dtype. "auto" is "float32" on a CPU, to which bfloat16 is
        no gain, and "bfloat16" on accelerators.
      platform: "cpu", "gpu" or "tpu"; None: this machine's default one. capability: compute
        capability of a GPU, "9.0" for example.
      machine, name: words for the device and the argument in messages.

    Raises:
      UserError: another value; TF32 where there is none.
    """
    asked = arguments.dtype(name, decode_dtype, CHOICES)
    if platform is None:
        platform, capability = target.platform(), target.capability()
    if asked == AUTO:
        return FLOAT32 if platform == "cpu" else BFLOAT16
    major = (capability or "").partition(".")[0]
    if asked == TF32 and not (platform == "gpu" and major.isdecimal() and int(major) >= AMPERE):
        # results would say that it was used where it was not
        known = f"compute capability {capability}" if capability else "an unknown capability"
        needed = f"TF32 needs an NVIDIA GPU of compute capability 8.0 or higher, not {known}"
        why = needed if platform == "gpu" else f"a {platform.upper()} has no TF32"
        raise UserError(f"{name}={TF32}: {why} ({machine}): choose {AUTO}, {BFLOAT16} or {FLOAT32}")
    return asked


def arrays(decode_dtype) -> jnp.dtype:
    """The dtype of feature maps and weights. decode_dtype: one of `DTYPES`, or a dtype."""
    is_tf32 = isinstance(decode_dtype, str) and decode_dtype == TF32
    return jnp.dtype(FLOAT32 if is_tf32 else decode_dtype)


def products(decode_dtype) -> contextlib.AbstractContextManager[None]:
    """Sets the precision of products and convolutions that are traced inside, whatever is set
    outside. decode_dtype: one of `DTYPES`, or a dtype.

    With float32 operands, XLA takes TF32 on a GPU only at the precision "default"; "high" and even
    "tensorfloat32" give products of float32 there.
    """
    is_tf32 = isinstance(decode_dtype, str) and decode_dtype == TF32
    full = not is_tf32 and arrays(decode_dtype) == jnp.float32
    return jax.default_matmul_precision("highest" if full else "default")

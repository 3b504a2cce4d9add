"""Choosing tokens from logits: signature, documentation and dispatch."""

from jaxtyping import Array, Float, Int

from pallas_kernels import implementations

MODULES = implementations.modules_of(__package__)


def sample(
    logits: Float[Array, "R T V"],
    noise: Float[Array, "B T V"],
    *,
    tau: Float[Array, ""] | None = None,
    strength: Float[Array, ""] | None = None,
    top_k: int = 0,
    top_p: float = 0.0,
    implementation: str | None = None,
) -> Int[Array, "B T"]:
    """The vocabulary entry of every token: the largest of filtered logits + noise, of equal ones
    the first.

    Kernels compute what the reference does, in the same steps. What can differ by a rounding is
    the division by `tau` and the guidance, where a compiler joins a product and a sum into one
    operation, and the sums of probabilities of top-p, whose order is the compiler's: there one more
    or one fewer logit (and those equal to it) may survive where what is rejected is within about
    1e-6 of 1 - p. Given guided logits, top-k and the choice are the same bit for bit.

    Args:
      logits: float32, as the head gives them; with `strength` R = 2 B, the conditional rows first.
      noise: float32; Gumbel noise makes the choice a draw.
      tau: temperature, which logits are divided by; None: they are not.
      strength: t in (1 + t) cond - t uncond; None: there is no guidance, R = B.
      top_k, top_p: see `reference.filter_logits`; 0 is off.
      implementation: one of `implementations.NAMES`; None takes the best one for this platform.

    Raises:
      NotImplementedError: the implementation named cannot run, with the reason.
    """
    return implementations.run(
        implementation,
        MODULES,
        "sample",
        logits,
        noise,
        tau=tau,
        strength=strength,
        top_k=int(top_k),  # estimates refuse NumPy's numbers
        top_p=float(top_p),
    )

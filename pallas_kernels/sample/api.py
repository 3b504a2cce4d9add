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
    """The vocabulary entry of every token: the largest of filtered logits + noise, the first of
    equal ones.

    Kernels compute the same steps as the reference. Results can differ by a rounding in two places.
    In the division by `tau` and in the guidance a compiler may join a product and a sum into one
    operation. In top-p the order of sums of probabilities is the compiler's: one more or one fewer
    logit (with the logits equal to it) may survive where the rejected probabilities add up to
    within about 1e-6 of 1 - p. Given guided logits, top-k and the choice are the same bit for bit.

    Args:
      logits: float32, as the head gives them. With `strength` R = 2 B and the conditional rows come
        first, without it R = B.
      noise: float32; Gumbel noise makes the choice a draw.
      tau: temperature, by which logits are divided; None: 1.
      strength: t of the guidance (1 + t) cond - t uncond; None: no guidance.
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

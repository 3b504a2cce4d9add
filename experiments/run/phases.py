"""What each phase of a run takes on the device: the text encoder, drawing codes, decoding pixels.

Bytes are those of the compiled program: its arguments (the weights that it reads among them), its
results and temporaries. The phases follow each other; what one has taken, but for weights that
stay, is free in the next.
"""

import jax

from varjax.generator import Generator
from varjax.text import batches
from varjax.text.encoder import TextEncoder
from varjax.text.features import TextFeatures


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes on one device while a program runs."""
    stats = compiled.memory_analysis()
    own = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    return own + stats.output_size_in_bytes - stats.alias_size_in_bytes


def generation_phases(generator: Generator, text: int | None) -> dict[str, int | None]:
    """Bytes by phase. text: of the encoder; None if features came from a file or there is none."""
    return {
        "text": text,
        "transformer": peak_bytes(generator.compiled),
        "decode": peak_bytes(generator.compiled_decoder),
    }


def encoder_bytes(encoder: TextEncoder, features: TextFeatures, batch_size: int) -> int | None:
    """Bytes of the largest program that made these features, which is there already; None if all
    texts are empty and there was none."""
    negative = () if features.negative_lens is None else features.negative_lens
    texts = int((~features.unconditional).sum()) + len(negative)
    if not texts:
        return None
    rows = min(batch_size, texts)
    return peak_bytes(batches.compiled(encoder.module, rows, features.longest))

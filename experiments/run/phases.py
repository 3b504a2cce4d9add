"""What each phase of a run takes on the device: the text encoder, drawing codes, decoding pixels.

Bytes are those of the compiled program. The phases follow each other; what one has taken, but for
weights that stay, is free in the next.
"""

from varjax.engine.memory import peak_bytes
from varjax.generator import Generator


def generation_phases(generator: Generator, text: int | None) -> dict[str, int | None]:
    """Bytes by phase. text: of the encoder; None if features came from a file or there is none."""
    return {
        "text": text,
        "transformer": peak_bytes(generator.compiled),
        "decode": peak_bytes(generator.compiled_decoder),
    }

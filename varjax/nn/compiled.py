"""Memory of a compiled program."""

import jax


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes on one device while a program runs: its arguments (the weights that it reads among
    them), its results and its temporaries."""
    stats = compiled.memory_analysis()
    own = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    return own + stats.output_size_in_bytes - stats.alias_size_in_bytes

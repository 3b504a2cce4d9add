"""One compiled program: the compiler is called, its verdict is read, its memory is measured."""

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from experiments.aot import buffers
from varjax.engine.cost import Cost, device_bytes, program_cost, used_inputs
from varjax.engine.memory import peak_bytes


class DoesNotFit(Exception):
    """The compiler refused a program that needs more bytes (`needed`) than the chip has."""

    def __init__(self, message: str, needed: int):
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True)
class Program:
    """One compiled program; bytes are those of one device.

    memory: the compiler's analysis. formats: of the arguments.
    reads: which weights are arguments of this program; `unread`: bytes of the others, which are on
      the device all the same.
    resident: bytes on the device while it runs: arguments, results, temporaries, code, `unread`.
    live: temporaries at the moment when they take most (empty: the compiler did not say).
    copies: {array of the state: where it exists a second time}; nothing for those updated in place.
    compile_s: seconds, tracing included.
    """

    memory: Any
    formats: Any
    reads: list[bool]
    unread: int
    resident: int
    cost: Cost
    compile_s: float
    live: list[buffers.Buffer]
    copies: dict[str, list[str]]


def compile_program(
    trace: Callable[[], jax.stages.Traced], networks: Any, carried: Sequence[buffers.Carried] = ()
) -> Program:
    """Compile and measure a program.

    Args:
      trace: makes the traced program.
      networks: the shapes of its first argument, the weights.
      carried: arrays that should be updated in place.

    Raises:
      DoesNotFit: the compiler says so.
    """
    start = time.perf_counter()
    traced = trace()
    lowered = traced.lower()
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_hlo_as_text": True, "xla_dump_to": folder}
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if needed := memory_asked(str(error)):
                raise DoesNotFit(first_line(str(error)), needed) from None
            raise
        elapsed = time.perf_counter() - start
        text = compiled.as_text()
        found = buffers.read_dump(Path(folder), text)
    stats, weights = compiled.memory_analysis(), jax.tree.leaves(networks)
    reads = used_inputs(traced.jaxpr)[: len(weights)]
    unread = sum(device_bytes(a) for a, used in zip(weights, reads, strict=True) if not used)
    return Program(
        memory=stats,
        formats=compiled.input_formats,
        reads=reads,
        unread=unread,
        resident=peak_bytes(compiled) + stats.generated_code_size_in_bytes + unread,
        cost=program_cost(traced.jaxpr),
        compile_s=elapsed,
        live=buffers.fullest_moment(found),
        copies=buffers.second_copies(text, found, carried),
    )


# --- compilers that refuse ---

_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def memory_asked(message: str) -> int | None:
    """Bytes that a TPU compiler's out-of-memory message names; None for any other message, such as
    one about a kernel's own memory."""
    if "RESOURCE_EXHAUSTED" not in message or "hbm" not in message.lower():
        return None
    asked = re.search(r"Used ([\d.]+)([BKMGT]?) of [\d.]+[BKMGT]? hbm", message)
    asked = asked or re.search(r"temporaries \(([\d.]+)([BKMGT]?)\) exceeds", message)
    return int(float(asked[1]) * _UNITS[asked[2] or "B"]) if asked else None


def first_line(message: str) -> str:
    """The first line of a message, cut to a readable length."""
    return message.strip().splitlines()[0][:300] if message.strip() else ""

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
from experiments.aot.buffers import Buffer
from varjax.engine.cost import Cost, device_bytes, program_cost, used_inputs


class DoesNotFit(Exception):
    """The compiler refused a program because the chip's memory is too small.

    needed: bytes that it asked for.
    """

    def __init__(self, message: str, needed: int):
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True)
class Program:
    """One compiled program; bytes are those of one device.

    arguments, outputs, aliased, temporaries, code: of the compiler's memory analysis; `aliased` is
      the part of the outputs that lies in donated arguments.
    reads: which weights are arguments of this program; `unread`: bytes of the others, which are on
      the device all the same.
    live: temporaries at the moment when they take most (empty: the compiler did not say).
    copies: {array of the state: where it exists a second time}; nothing for those updated in place.
    compile_s: seconds, tracing included.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    reads: list[bool]
    unread: int
    cost: Cost
    compile_s: float
    live: list[Buffer]
    copies: dict[str, list[str]]

    @property
    def resident(self) -> int:
        """Bytes on the device while the program runs: its arguments, results, temporaries and
        code, and the weights that it does not read."""
        own = self.arguments + self.outputs - self.aliased + self.temporaries
        return own + self.code + self.unread


def compile_program(
    trace: Callable[[], jax.stages.Traced], networks: Any, carried: Sequence[buffers.Carried] = ()
) -> tuple[Program, Any]:
    """A program and the formats of its arguments.

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
        try:
            compiled = lowered.compile(
                compiler_options={**buffers.DUMP_OPTIONS, "xla_dump_to": folder}
            )
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
    program = Program(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        reads=reads,
        unread=unread,
        cost=program_cost(traced.jaxpr),
        compile_s=elapsed,
        live=[] if found is None else found.live,
        copies=buffers.second_copies(text, found, carried),
    )
    return program, compiled.input_formats


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

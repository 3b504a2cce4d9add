"""How near operations come to the peaks of a chip, as measured on it: `efficiencies.json`.

The file has a record for each chip that something was measured on:

    chip                a name of `pallas_kernels.chips`
    device, driver, jax, date, revision, source
                        what ran where, when, at which commit; where the measurement is written down
    peaks               {"bf16_flops", "bandwidth"} of which the shares are taken
    operations          {operation: its numbers}; `OPERATIONS` has their names

The numbers of an operation are those of `Efficiency`: "call_us", "bandwidth" and "flops", where
programs of a kernel copy block by block "program_us" and "copy_ns" too; of "gaps" "call_us" only.
They hold for calls as large as those that were measured: "least_bytes", "least_flops". "basis"
says how they were found ("measured", or "counted" in compiled instructions), "note" may say more.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pallas_kernels import chips
from pallas_kernels.chips import Chip
from varjax import arguments
from varjax.errors import UserError, about, choose, show
from varjax.io.json_text import json_text
from varjax.storage.atomic import new_file
from varjax.storage.manifest import read_json

FILE = Path(__file__).with_name("efficiencies.json")
FORMAT = {"format": "varjax efficiencies", "version": 1}
GAPS = "gaps"
# {operation: what it is}
OPERATIONS = {
    "products": "matrix products in bfloat16, by libraries or XLA",
    "products, other types": "products and convolutions in other types",
    "attention": "kernels of ragged attention",
    "finish": "the kernel that finishes keys and values, and may store them",
    "write": "the kernel that stores keys and values",
    "choosing": "the kernel that chooses tokens",
    "token attention": "kernels of token attention",
    "other kernels": "all other kernels of ours",
    "fusions": "XLA's other kernels: fusions, copies, reductions",
    GAPS: "between the end of a kernel and the start of the next one",
}
# operations of our kernels by their names in compiled programs
_OF_KERNELS = {
    "ragged_attention": "attention",
    "finish": "finish",
    "finish_and_store": "finish",
    "cache_write": "write",
    "sample": "choosing",
    "token_attention": "token attention",
}
BASES = ("measured", "counted")
_TEXTS = ("device", "driver", "jax", "date", "revision", "source")
_NUMBERS = (
    *("call_us", "bandwidth", "flops", "program_us", "copy_ns"),
    *("least_bytes", "least_flops"),
)


def of_kernel(name: str) -> str:
    """The operation of a kernel of ours."""
    return _OF_KERNELS.get(name, "other kernels")


@dataclass(frozen=True)
class Efficiency:
    """The numbers of an operation.

    call: seconds that a call takes besides what it moves and computes.
    bandwidth, flops: shares of the peaks that are reached.
    program, copy: of kernels whose programs copy block by block: seconds of a program besides its
      blocks, and between the starts of two copies.
    least_bytes, least_flops: of the smallest calls that the numbers hold for.
    basis: "measured", "counted" or "assumed".
    """

    call: float
    bandwidth: float = 1.0
    flops: float = 1.0
    program: float = 0.0
    copy: float = 0.0
    least_bytes: float = 0.0
    least_flops: float = 0.0
    basis: str = "measured"

    def seconds(self, moving: float, computing: float) -> float:
        """Seconds of a call. moving, computing: what it would take at the chip's peaks."""
        return self.call + max(moving / self.bandwidth, computing / self.flops)

    def seconds_in_turns(
        self, moving: float, computing: float, programs: int, copies: float, cores: int
    ) -> float:
        """Seconds of a call whose programs run one to a core, in turns. Each copies `copies` blocks
        and computes on what has arrived."""
        turns = -(-programs // cores)
        each = computing * cores / programs / self.flops
        programs_take = turns * (self.program + max(copies * self.copy, each))
        return self.call + max(moving / self.bandwidth, programs_take)


@dataclass(frozen=True)
class Record:
    """What was measured on a chip; `content` is the record of the file."""

    chip: str
    content: Mapping
    operations: Mapping[str, Efficiency] = field(default_factory=dict)

    @property
    def said(self) -> str:
        """For tables: where and when it was measured."""
        return f"{self.content['device']}, {self.content['date']}"

    @property
    def gap(self) -> float:
        """Seconds between two kernels."""
        return self.operations[GAPS].call if GAPS in self.operations else 0.0


def of(chip: Chip) -> Record | None:
    """The record of a chip; None where nothing was measured on it.

    Raises:
      UserError: the file is damaged, or its shares are of other peaks than the chip's.
    """
    return _known().get(chip.name)


@cache
def _known() -> dict[str, Record]:
    return read()


def read(path: Path = FILE) -> dict[str, Record]:
    """The records of a file, by chip.

    Raises:
      UserError: the file is none of efficiencies, of another version, or says something that is not
        known here.
    """
    with about(path):
        try:
            content = read_json(path)
        except UserError as error:
            raise UserError(f"{error}: give a file that `adopt` has written") from None
        return checked(content)


def checked(content: object) -> dict[str, Record]:
    """The records of a file's content, by chip. Raises `UserError` as `read` does."""
    _has_format(content)
    records = content.get("chips")
    if not isinstance(records, list):
        raise UserError(f"chips={show(records)}: it must be a list of records")
    found: dict[str, Record] = {}
    for number, given in enumerate(records):
        with about(f"chips[{number}]"):
            record = _record(given)
            if record.chip in found:
                raise UserError(f"a second record of {record.chip}: leave one of them out")
        found[record.chip] = record
    return found


def adopt(record: Mapping, path: Path = FILE) -> None:
    """Put a chip's record into a file, in place of an older record of that chip. Operations that
    the new one lacks are lost.

    Raises:
      UserError: the record or the file cannot be read (`checked`); the file stays as it is.
    """
    records = {r.chip: r.content for r in read(path).values()} if path.exists() else {}
    new = _record(record)
    records[new.chip] = new.content
    with new_file(path) as file:
        file.write(json_text({**FORMAT, "chips": list(records.values())}).encode())
    _known.cache_clear()


def _has_format(content: object) -> None:
    if not isinstance(content, Mapping) or content.get("format") != FORMAT["format"]:
        raise UserError(f"no file of efficiencies: its format should be {FORMAT['format']!r}")
    if content.get("version") != FORMAT["version"]:
        given, known = show(content.get("version")), FORMAT["version"]
        raise UserError(
            f"version={given}: this varjax reads version {known}: measure again with it"
        )


def _record(given: object) -> Record:
    if not isinstance(given, Mapping):
        raise UserError(f"{show(given)}: a record must be a table")
    known = {*_TEXTS, "chip", "peaks", "operations"}
    for name in given:
        choose("field", name, sorted(known))
    chip = chips.CHIPS[choose("chip", given.get("chip"), chips.CHIPS)]
    for name in _TEXTS:
        arguments.text(name, given.get(name))
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", given["date"]):
        raise arguments.wrong("date", given["date"], "write year-month-day")
    _of_this_chip(given.get("peaks"), chip)
    operations = given.get("operations")
    if not isinstance(operations, Mapping):
        raise arguments.wrong("operations", operations, "it must be a table")
    found = {name: _efficiency(name, numbers) for name, numbers in operations.items()}
    return Record(chip.name, given, found)


def _of_this_chip(peaks: object, chip: Chip) -> None:
    """Refuse shares of other peaks than the chip's, those of another chip for example."""
    if chip.gpu is None:
        raise UserError(
            f"{chip.name}: records are of GPUs; times of TPUs are the compiler's cycles"
        )
    wanted = {"bf16_flops": chip.bf16_flops, "bandwidth": chip.bandwidth}
    given = peaks if isinstance(peaks, Mapping) else {}
    if set(given) != set(wanted) or not all(_near(given[name], wanted[name]) for name in wanted):
        raise UserError(
            f"peaks={show(peaks)}: {chip.name} has {wanted}: name the chip that was measured, or"
            " take the shares anew"
        )


def _near(given: object, wanted: float) -> bool:
    return isinstance(given, (int, float)) and math.isclose(given, wanted, rel_tol=1e-6)


def _efficiency(operation: str, numbers: object) -> Efficiency:
    choose("operation", operation, OPERATIONS)
    if not isinstance(numbers, Mapping):
        raise arguments.wrong(operation, numbers, "it must be a table of numbers")
    allowed = ("call_us",) if operation == GAPS else _NUMBERS
    with about(operation):
        for name in numbers:
            choose("number", name, (*allowed, "basis", "note"))
        basis = choose("basis", numbers.get("basis", "measured"), BASES)
        call = arguments.number("call_us", numbers.get("call_us"), 0, 1e6)
        shares = [
            arguments.number(name, numbers.get(name, 1.0), 0, 1, above=True)
            for name in ("bandwidth", "flops")
        ]
        program, copied, *least = (
            arguments.number(name, numbers.get(name, 0.0), 0, 1e15) for name in _NUMBERS[3:]
        )
    return Efficiency(call * 1e-6, *shares, program * 1e-6, copied * 1e-9, *least, basis)

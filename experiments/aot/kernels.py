"""Bytes, FLOPs and seconds of each kernel of a compiled program.

On a GPU every fusion, library call, copy or other operation outside fusions is a kernel, as often
as its loops run. It takes max(bytes / bandwidth, FLOPs / rate) + the time of its start. Bytes are
those of its operands and results, with three exceptions: only the slices count of an operand that
is cut into slices, only the change counts of an array that is changed in place, and a library
call's scratch does not count. Bandwidth and rate are shares of the chip's peaks that good kernels
reach (`REACHED`); the rate is that of the units that multiply numbers of that type. On a TPU
seconds are the cycles that the compiler estimates.
"""

import math
import re
from dataclasses import dataclass, replace

from experiments.aot.buffers import short_source
from experiments.aot.hlo import Array, Computation, Instruction, Module, arrays
from pallas_kernels.chips import Chip

REACHED = {"bandwidth": 0.9, "flops": 0.8}  # of a chip's peaks, by large copies and products
START = 2.5e-6  # seconds until a kernel of a GPU computes
NO_CYCLES = 2**62  # a TPU's compiler says so many where it has no estimate: int64's largest number
LARGE = 2**20  # bytes; smaller slices of stacked arrays cost little

# operations that may stand outside fusions, all of which read and write memory
_KERNELS = set(
    "fusion copy transpose reshape broadcast convert reduce reduce-window scatter gather slice "
    "dynamic-slice dynamic-update-slice concatenate pad select compare add subtract multiply "
    "divide maximum minimum exponential log sort rng rng-bit-generator rng-get-and-update-state "
    "convolution dot custom-call reverse select-and-scatter clamp negate and or not xor tanh "
    "rsqrt sqrt power map triangular-solve cholesky fft topk".split()
)
_COLLECTIVES = set("all-reduce all-gather all-to-all reduce-scatter collective-permute".split())
_PALLAS = re.compile(r'custom_call_target="(?:__gpu\$xla\.gpu\.triton|mosaic_gpu|tpu_custom_call)')
_SLICES = {"dynamic-slice", "slice"}
# operations that change an array in place, and which of their operands is the change
_CHANGES = {"dynamic-update-slice": 1, "scatter": -1}
_MOVES = _SLICES | set("copy transpose bitcast reshape convert".split())
_WITH_SCRATCH = ("__cublas$", "__cudnn$")  # library calls whose last of several results is scratch
# what a fusion that only cuts slices may contain beside moves: the computation of where they start
_INDICES = set("parameter constant tuple get-tuple-element add compare select broadcast".split())


@dataclass(frozen=True)
class Kernel:
    """One operation of the text.

    source: operation of our sources.
    kind: "product", "pallas", "weights" (large slices that are copied out of stacked arrays),
      "collective", "unknown" or "other".
    loop: the loop whose body it is in; empty: none.
    times: how often it runs.
    bytes, flops, seconds, cycles: of one run.
    rate: peak operations per second of the units that compute its products; 0 without products.
    """

    name: str
    source: str
    kind: str
    loop: str
    times: float
    bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0
    cycles: float = 0.0
    rate: float = 0.0


class Costs:
    """Costs of the instructions of a program on a chip."""

    def __init__(self, module: Module, chip: Chip):
        self.module, self.chip, self.on_tpu = module, chip, chip.platform == "tpu"

    def kernel(self, i: Instruction, within: Computation, loop: str, times: float) -> Kernel:
        """An instruction as a `Kernel`, with its costs. within: the computation that it is in."""
        source = short_source(i.attribute(r'op_name="([^"]*)"') or "")
        found = Kernel(i.name, source, "other", loop, times)
        opcode = i.opcode.removesuffix("-start")
        if _PALLAS.search(i.attributes):
            path = i.attribute(r'op_name="([^"]*)"') or ""
            start = 0.0 if self.on_tpu else START
            return replace(found, kind="pallas", source=path, seconds=start)
        if self.on_tpu and opcode not in _COLLECTIVES:
            return self._on_tpu(found, i, within)
        if opcode in _COLLECTIVES:
            found = replace(found, kind="collective", bytes=2 * i.bytes)
        elif i.opcode == "fusion":
            found = self._fusion(found, i, within)
        else:
            found = self._plain(found, i, within)
        if opcode not in _KERNELS | _COLLECTIVES:
            found = replace(found, kind="unknown")
        rate = self._rate(i, within) if found.flops else 0.0
        moving = found.bytes / (REACHED["bandwidth"] * self.chip.bandwidth)
        computing = found.flops / (REACHED["flops"] * rate) if rate else 0.0
        seconds = max(moving, computing) + (0.0 if self.on_tpu else START)
        cycles = seconds * (self.chip.clock or 0.0)
        return replace(found, seconds=seconds, cycles=cycles, rate=rate)

    def _rate(self, i: Instruction, within: Computation) -> float:
        """FLOPs per second of the units that compute a GPU's product. Both operands of a product in
        8 bits have 8. Tensor cores compute float32 products in TF32 at half of their rate. Products
        in full precision run on float32 units."""
        if i.opcode == "fusion":
            bodies = [self.module[name] for name in i.called("calls")]
            inside = [(x, body) for body in bodies for x in body]
            rates = [self._rate(*x) for x in inside if self._is_product(*x)]
            return min(rates, default=self.chip.bf16_flops)
        kinds = {first(within, name).kind for name in i.operands[:2]}
        if kinds == {"s8"} or kinds == {"f8e4m3fn"}:
            peak = self.chip.int8_flops if kinds == {"s8"} else self.chip.fp8_flops
            return peak or self.chip.bf16_flops
        if "f32" not in kinds:
            return self.chip.bf16_flops
        exact = re.search("highest", i.attributes, re.IGNORECASE)
        return self.chip.gpu.float32_flops if exact else self.chip.bf16_flops / 2

    def _is_product(self, i: Instruction, within: Computation) -> bool:
        return bool(self._products(i) if i.opcode == "fusion" else self._product(i, within))

    def _on_tpu(self, found: Kernel, i: Instruction, within: Computation) -> Kernel:
        said, clock = i.attribute(r'"?estimated_cycles"?:\s*"?(\d+)'), self.chip.clock or 0.0
        if said and int(said) >= NO_CYCLES:
            said = None
        # Products are convolutions here, whose windows may stand for a batch. So their FLOPs are
        # taken from the traced program, not from this text.
        product = i.opcode == "fusion" and self._products(i) > 0
        kind, cycles = "product" if product else "other", float(said or 0)
        # copies that run beside other work have no cycles of their own
        moved = i.opcode.startswith(("copy", "slice", "async", "send", "recv"))
        moved |= '"ConcatBitcast"' in i.attributes  # slices that lie side by side already
        if said is None and i.opcode == "dynamic-update-slice":  # in place
            written = within.get(i.operands[_CHANGES[i.opcode]])
            cycles = 2 * (written or i).bytes / self.chip.bandwidth * clock
        elif said is None and not moved and self._moves_much(i):
            kind, cycles = "unknown", 2 * i.bytes / self.chip.bandwidth * clock
        return replace(found, kind=kind, cycles=cycles, seconds=cycles / clock if clock else 0.0)

    @staticmethod
    def _moves_much(i: Instruction) -> bool:
        return i.bytes >= LARGE

    # --- bytes and products of one kernel of a GPU ---

    def _plain(self, found: Kernel, i: Instruction, within: Computation) -> Kernel:
        """The costs of an operation outside fusions."""
        operands = [within.get(name) for name in i.operands]
        shapes = [a for o in operands if o for a in arrays(o.shape)]
        library = (i.attribute(r'custom_call_target="([^"]*)"') or "").startswith(_WITH_SCRATCH)
        results = arrays(i.shape)
        results = results[:-1] if library and len(results) > 1 else results
        written = sum(a.bytes for a in results)
        moved = sum(a.bytes for a in shapes) + written
        if i.opcode in _SLICES:
            moved = 2 * i.bytes
            large = i.bytes >= LARGE
            return replace(found, bytes=moved, kind="weights" if large else "other")
        if i.opcode in _CHANGES and len(operands) > 1 and operands[_CHANGES[i.opcode]]:
            moved = 2 * operands[_CHANGES[i.opcode]].bytes
        flops = self._library(i, shapes) if i.opcode == "custom-call" else self._product(i, within)
        if flops is None:
            return replace(found, bytes=moved, kind="unknown")
        return replace(found, bytes=moved, flops=flops, kind="product" if flops else "other")

    @staticmethod
    def _library(i: Instruction, operands: list[Array]) -> float | None:
        """FLOPs of a library call; None if it is not known."""
        target, results = i.attribute(r'custom_call_target="([^"]*)"') or "", arrays(i.shape)
        if target.startswith(("__cublas$", "__triton_gemm")):
            size = operands[0].dims[-1]
            if contracted := i.attribute(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]'):
                dims = [int(d) for d in re.findall(r"\d+", contracted)]
                size = math.prod(operands[0].dims[d] for d in dims)
            return 2.0 * size * results[0].size
        if target.startswith("__cudnn$conv"):
            # every output number sums over the window and the inputs of its own feature
            features = i.attribute(r"dim_labels=\w+_([\w]+)->")
            axis = features.index("o") if features else 0
            return 2.0 * results[0].size * operands[1].size / operands[1].dims[axis]
        known = ("TopK", "annotate", "Sharding", "__cub$", "cub", "xla.gpu.ext", "SliceToDynamic")
        return 0.0 if target.startswith(known) else None

    def _fusion(self, found: Kernel, i: Instruction, within: Computation) -> Kernel:
        [name] = i.called("calls")
        body, moved = self.module[name], 0.0
        for number, operand in enumerate(i.operands):
            given = within.get(operand)
            moved += self._read(body, number, given.bytes if given else 0.0)
        moved += self._written(body)
        flops, kind = self._products(i), "other"
        if flops:
            kind = "product"
        elif self._only_slices(body):
            kind = "weights"
        return replace(found, bytes=moved, flops=flops, kind=kind)

    @staticmethod
    def _read(body: Computation, number: int, whole: float) -> float:
        """Bytes of an operand that a fusion reads: all of it, or the slices that it is cut into, or
        none if the fusion only changes it in place."""
        parameter = body.parameters.get(number)
        if parameter is None:
            return 0.0
        names, seen, sliced, users = [parameter.name], {parameter.name}, 0.0, []
        while names:  # through bitcasts
            for user in body.users(names.pop()):
                seen |= {user.name} if user.opcode == "bitcast" else set()
                names += [user.name] if user.opcode == "bitcast" else []
                users += [user] if user.opcode != "bitcast" else []
        for user in users:
            if user.opcode in _SLICES or user.opcode == "gather":
                sliced += user.bytes
            elif user.opcode not in _CHANGES or user.operands[0] not in seen:
                return whole
        return min(whole, sliced) if users else 0.0

    @staticmethod
    def _written(body: Computation) -> float:
        """Bytes of the results. Only the change counts of an array that is changed in place."""
        roots = [body.root]
        if body.root.opcode == "tuple":
            roots = [body.get(name) for name in body.root.operands]
        total = 0.0
        for root in roots:
            while root is not None and root.opcode == "bitcast":
                root = body.get(root.operands[0])
            if root is not None and root.opcode in _CHANGES:
                root = body.get(root.operands[_CHANGES[root.opcode]])
            total += root.bytes if root is not None else 0.0
        return total

    @staticmethod
    def _only_slices(body: Computation) -> bool:
        """Whether a fusion does nothing but cut large slices and perhaps turn them."""
        if any(i.opcode not in _MOVES | _INDICES for i in body):
            return False
        large = [i.opcode for i in body if i.bytes >= LARGE]
        if any(opcode not in _MOVES and opcode != "parameter" for opcode in large):
            return False  # it computes with large arrays, not only with indices
        return any(i.opcode in _SLICES and i.bytes >= LARGE for i in body)

    def _products(self, i: Instruction) -> float:
        """FLOPs of the products within a fusion and what it calls."""
        return sum(self._products_of(self.module[name]) for name in i.called("calls"))

    def _products_of(self, body: Computation) -> float:
        total = 0.0
        for i in body:
            total += self._products(i) if i.opcode == "fusion" else self._product(i, body)
        return total

    @staticmethod
    def _product(i: Instruction, within: Computation) -> float:
        """FLOPs of a product or convolution; 0 for everything else."""
        if i.opcode not in ("dot", "convolution"):
            return 0.0
        left, right = (first(within, name) for name in i.operands[:2])
        out = arrays(i.shape)[0].size
        if i.opcode == "dot":
            dims = re.findall(r"\d+", i.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or "")
            return 2.0 * out * math.prod(left.dims[int(d)] for d in dims)
        labels = i.attribute(r"dim_labels=\w+_(\w+)->") or "o"
        return 2.0 * out * right.size / right.dims[labels.index("o")]


def first(within: Computation, name: str) -> Array:
    return arrays(within.instructions[name].shape)[0]

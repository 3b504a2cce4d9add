"""The flags that decide how programs are compiled: types, segments, kernels, devices, batches."""

import contextlib
from collections.abc import Sequence
from functools import partial

import jax
from absl.flags import FlagHolder

from experiments.budgets import Sizing
from experiments.cli.flags import CommandFlags, about
from experiments.generation import ProgramOptions
from pallas_kernels import implementations
from pallas_kernels.chips import Chip
from varjax.codecs import arithmetic
from varjax.conditions import Condition
from varjax.core import arguments, errors
from varjax.core.errors import UserError
from varjax.core.plan import KV_DTYPES, CachePlan
from varjax.fast import schemes
from varjax.fast.schemes import SCHEMES
from varjax.generation import hosts, memory, sharding, weights
from varjax.generation.api import USUAL_BATCH
from varjax.generation.build import LAYERS, MATMUL_PRECISIONS, Build
from varjax.generation.mesh import MeshSpec
from varjax.models.loading import DTYPES, WEIGHTS_DTYPES, computed_in
from varjax.models.model import Model
from varjax.storage.parameters import default_dtype

AUTO = "auto"


# --- flags that several commands define alike ---


def batch_size_flag(
    flags: CommandFlags, default: int, help: str = "Images per program call."
) -> FlagHolder[int]:
    """For a command that takes the number as it is."""
    return flags.integer(
        "batch_size", default, help, lower_bound=1, upper_bound=arguments.LARGEST_BATCH
    )


def dtype_flag(flags: CommandFlags, default: str | None, of: str) -> FlagHolder[str]:
    """default: None is float32 on CPU, else bfloat16. of: what has that type."""
    usual = "" if default else "; default: float32 on CPU, else bfloat16"
    return flags.enum("dtype", default, sorted(DTYPES), f"Type of {of}{usual}.")


class ProgramFlags:
    """--dtype, --weights_dtype, --kv_dtype, --program, --batch_size and, if `mesh` says so, --mesh.

    elsewhere: programs are compiled for chips that are not here. Types then default to what chips
    compute in, and each chip is checked for what it can do.
    batches: whether the command has a --batch_size, `asked`. usual: without it, where the batch is
      taken as it is.
    """

    def __init__(
        self,
        flags: CommandFlags,
        *,
        mesh: bool = False,
        elsewhere: bool = False,
        batches: bool = True,
        usual: int = USUAL_BATCH,
    ):
        flags.heading("How programs are compiled, and their types")
        self._elsewhere, self._mesh = elsewhere, None
        if mesh:
            self._mesh = flags.string(
                "mesh",
                None,
                "Devices to split over: data=4 (images), data=4,model=2 (also heads and weights); "
                "one axis may be -1: what is left over.",
            )
        if elsewhere:
            self.asked = batch_size_flag(flags, usual)
        elif batches:
            said = f"Images per program call; default: {USUAL_BATCH}, or what fits."
            self.asked = flags.integer("batch_size", None, said)
        self._dtype = dtype_flag(flags, "bfloat16" if elsewhere else None, "weights and cache")
        self._weights = flags.enum(
            "weights_dtype",
            None,
            list(WEIGHTS_DTYPES),
            "Type of stored weights; default: --dtype, in which products run. int8: the matrices "
            "of the transformer's layers, with a scale per output channel. w8a8, fp8: "
            "activations, too, with a scale per row, on chips that multiply such numbers.",
        )
        self._kv_dtype = flags.enum(
            "kv_dtype",
            None,
            list(KV_DTYPES),
            "Type of stored keys and values; default: --dtype. A budget is a fraction of a full "
            "cache of this type. int8 has a scale per token. What --compare compares with has "
            "--dtype.",
        )
        self._define_settings(flags)

    def _define_settings(self, flags: CommandFlags) -> None:
        """Define --program: what few people set."""
        program = flags.group(
            "program",
            "Further settings, as segments=4,layers=scan. None changes the pictures but for "
            "rounding.",
            alone=("segments", "attention", "matmul_precision", "decode_dtype"),
        )
        kernels = implementations.PLATFORMS if self._elsewhere else implementations.NAMES[1:]
        stepwise = "; -interpret: step by step anywhere, slowly" * (not self._elsewhere)
        self._attention = program.enum(
            "attention",
            AUTO,
            [AUTO, "reference", *kernels],
            f"Attention and cache writing: auto takes mosaic on GPUs from Hopper on, triton on "
            f"others, tpu on TPU, else reference{stepwise}.",
        )
        self._segments = program.string(
            "segments", AUTO, "How many segments the scale loop is cut into: auto or a number."
        )
        self._layers = program.enum(
            "layers",
            AUTO,
            list(LAYERS),
            "scan: one compiled body for all layers; unroll: a body per layer, which copies no "
            "weights but takes longer to compile; auto: unroll large models, but not on TPUs, nor "
            "where only a scan fits.",
        )
        self._precision = program.enum(
            "matmul_precision", "default", list(MATMUL_PRECISIONS), "Precision of float32 products."
        )
        self._decode_dtype = program.enum(
            "decode_dtype",
            arithmetic.AUTO,
            list(arithmetic.CHOICES),
            "What the decoder of pixels computes in: auto is float32 on CPUs, else bfloat16, "
            "which is faster and rounds pixels; tf32 (NVIDIA GPUs) rounds them less.",
        )
        self._decode_batch = program.integer(
            "decode_batch",
            None,
            "Images decoded to pixels at a time, which lowers the peak; default: what takes 2 GiB.",
            lower_bound=1,
        )

    def resolve(self, model: Model, chip: Chip | None = None) -> ProgramOptions:
        """Return the options; all is checked that does not depend on the plan. chip: that programs
        are compiled for; None: this machine."""
        model.geometry.schedule.check_cut(self._segments.value, self._layers.value)
        given = self._dtype.value if self._dtype.present else None
        with about(self._weights):
            wanted = computed_in(given, self._weights.value)  # None: any
        dtype = wanted or self._dtype.value or default_dtype()
        attention = None if self._attention.value == AUTO else self._attention.value
        why = None if self._elsewhere or not attention else implementations.why_not_here(attention)
        if why:
            stepwise = implementations.step_by_step(attention)
            more = f", reference or {stepwise} (the kernel step by step, slow, for checking)"
            raise UserError(
                f"--attention={why}: choose auto{more if stepwise else ' or reference'}"
            )
        asked, name = self._decode_dtype.value, "--decode_dtype"
        if chip is None:
            decoded = arithmetic.resolve(asked, name=name)
        else:
            decoded = arithmetic.resolve(asked, chip.platform, chip.capability, chip.name, name)
        return ProgramOptions(
            dtype=dtype,
            weights_dtype=self._weights.value or dtype,
            kv_dtype=self._kv_dtype.value or dtype,
            build=Build(
                segments=self._segments.value,
                layers=self._layers.value,
                attention=attention,
                matmul_precision=self._precision.value,
                decode_batch=self._decode_batch.value,
                decode_dtype=decoded,
            ),
            mesh=self._mesh_here(model),
        )

    def stored(self, model: Model, chips: Sequence[Chip] = ()) -> Model:
        """Return the model, whose weights are not loaded yet, with weights as they will be stored.
        `UserError` if one of the chips, by default this machine's, does not multiply them."""
        name = self._weights.value
        if (scheme := SCHEMES.get(name)) is None:
            return model
        every = [schemes.why_not(scheme, chip) for chip in chips] or [schemes.why_not_here(scheme)]
        for why in filter(None, every):
            raise UserError(f"--weights_dtype={why}")
        return model.quantized(name)

    def _mesh_here(self, model: Model) -> MeshSpec:
        many = not self._elsewhere and hosts.count() > 1
        if self._mesh is None:
            return MeshSpec(data=len(jax.devices())) if many else MeshSpec()
        text = self._mesh.value or ("data=-1" if many else None)
        devices = None if self._elsewhere else len(jax.devices())
        with about(self._mesh):
            found = MeshSpec.parse(text, devices)
            if many and found.num_devices < devices:
                raise UserError(
                    f"{found} leaves out some of the {devices} devices of all processes: use all "
                    "of them, as with data=-1, or start fewer processes"
                )
        if not self._elsewhere:
            self.check_mesh(found, model, found.data, devices, hosts.where())
        return found

    def check_mesh(
        self, mesh: MeshSpec, model: Model, batch_size: int, available: int, where: str
    ) -> None:
        """Raise `UserError` if the model does not run on it (`MeshSpec.check`)."""
        with about(self._mesh):
            heads = model.config.num_heads
            mesh.check(batch_size=batch_size, num_heads=heads, available=available, where=where)
            weights.check_weights(model.networks, mesh)

    def check_plan(self, plan: CachePlan, mesh: MeshSpec) -> None:
        """Raise `UserError` if the plan cannot be carried out on the mesh."""
        with about(self._mesh):
            sharding.check_plan(plan, mesh)

    def sizing(self, options: ProgramOptions, model: Model, condition: Condition) -> Sizing:
        """Return what bytes of a cache mean on this machine, for --batch_size or, if it is not
        given, the usual batch."""
        shards = options.mesh.data
        each = self.asked.value or min(len(condition), USUAL_BATCH)
        each = -(-each // shards)
        return Sizing(
            batch_size=each * shards,
            kv_dtype=options.kv_dtype,
            predict=lambda plan: options.predict_here(model, plan, each, condition).total,
            available=memory.available_bytes(),
        )

    def batch_size(
        self,
        options: ProgramOptions,
        model: Model,
        plan: CachePlan,
        condition: Condition,
        *,
        dry_run: bool = False,
        jobs: int = 1,
    ) -> int:
        """Return --batch_size or, if it is not given, the usual size cut down to the images of the
        condition and to what fits. It is a multiple of the devices along `data`. jobs: how many
        share the images (`experiments.parts`)."""
        asked, shards = self.asked.value, options.mesh.data
        if asked is not None:
            arguments.integer("--batch_size", asked, 1, arguments.LARGEST_BATCH)
        if asked and asked % shards:
            raise UserError(
                f"--batch_size={asked} cannot be split evenly over data={shards} devices: choose a "
                f"multiple of {shards}"
            )

        predict = partial(options.predict_here, model, plan, condition=condition)
        asked, images = asked and asked // shards, -(-len(condition) // (shards * jobs))
        usual = -(-USUAL_BATCH // shards)
        if dry_run:
            return shards * (asked or min(images, usual))
        each = f"on each of the {shards} devices along data"
        with errors.about(each) if shards > 1 else contextlib.nullcontext():
            if asked:  # it has to fit also where there are fewer images
                memory.choose_batch_size(predict, asked, asked, usual)
            return shards * memory.choose_batch_size(predict, asked, images, usual)

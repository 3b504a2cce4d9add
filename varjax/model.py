"""`Model`: named parts (transformer, codec, ...) and what their checkpoint says about them.

A model may be abstract: configurations and shapes without weights. That is enough to plan a cache,
to check every argument and to compile for chips that are not here.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import jax
from flax import nnx

from varjax import arguments, jax_settings
from varjax.cache.allocation import Geometry
from varjax.errors import UserError, choose
from varjax.models import registry
from varjax.models.token_arrays import FORMS, TokenArrays
from varjax.models.transformer import Transformer
from varjax.nn import parameters, quantized, schemes
from varjax.nn.families import Family
from varjax.nn.parameters import default_dtype
from varjax.nn.published import TransformerConfig
from varjax.nn.schemes import SCHEMES
from varjax.sampling import Sampling
from varjax.sequence import TOKENS
from varjax.storage import checkpoint

DTYPES = ("float32", "bfloat16")
WEIGHTS_DTYPES = (*DTYPES, *SCHEMES)  # of stored weights
SAMPLING_WANTED = "Sampling, as model.sampling(cfg=2.0) gives it"


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A model of some family.

    parts: modules by name. Their leaves are arrays, or where `is_abstract` only shapes and types.
    metadata: content of `model.json`, or what a published size says.
    directory: folder of the checkpoint; None for a published name, which has no weights here.
    config: of the transformer. condition: of images, "labels", "text" or "prompt_ids".
    num_classes: of a class-conditional model; 0 for others.
    dtype: what the transformer computes in, and of all its weights but 8-bit matrices.
    """

    name: str
    parts: Mapping[str, nnx.Module]
    metadata: Mapping
    directory: Path | None = None

    config = property(attrgetter("transformer.config"))
    condition = property(attrgetter("config.condition"))
    num_classes = property(attrgetter("config.num_classes"))
    dtype = property(attrgetter("transformer.dtype"))

    def __repr__(self) -> str:
        count = sum(map(parameters.count, self.parts.values()))
        height, width = self.pixels
        condition = f"{self.num_classes} labels" if self.num_classes else self.condition
        eight = f", matrices in {self.weights_dtype}" if self.weights_dtype in SCHEMES else ""
        weights = f"{'only shapes of ' if self.is_abstract else ''}{self.dtype}{eight}"
        where = f"folder {self.directory}" if self.directory else "no checkpoint"
        return (
            f"Model {self.name} of the family {self.family.name}: {count:,} parameters ({weights}),"
            f" {height}x{width} pixels from {condition}, drawn by {self.geometry.schedule.kind}"
            f" {self.geometry.schedule}; {where}"
        )

    @property
    def family(self) -> Family:
        return registry.family(self.metadata["family"])

    @property
    def transformer(self) -> Transformer:
        return self.parts["transformer"]

    @property
    def codec(self) -> nnx.Module:
        return self.parts["codec"]

    @property
    def networks(self) -> dict[str, nnx.Module]:
        """The networks of generation: transformer and codec."""
        return {"transformer": self.transformer, "codec": self.codec}

    @property
    def weights_dtype(self) -> str:
        """The storage of the matrices of the transformer's layers: one of `SCHEMES`, or in the type
        of products."""
        kernel = self.transformer.head.kernel.get_value()
        return kernel.scheme.name if quantized.is_one(kernel) else str(self.dtype)

    @property
    def token_arrays(self) -> TokenArrays:
        """What makes arrays of its tokens: in the form in which they are drawn, and for files."""
        return FORMS[self.transformer.token_name](self.config)

    @property
    def draws_tokens(self) -> bool:
        """Whether images are drawn token by token, not scale by scale."""
        return self.transformer.sequence(one_slot=True).kind == TOKENS

    @property
    def code_map(self) -> tuple[int, int, int]:
        """Height, width and channels of the latent map that the codec decodes."""
        return self.transformer.code_map(self.codec.config)

    @property
    def pixels(self) -> tuple[int, int]:
        """Height and width of the pictures."""
        height, width, _ = self.code_map
        return height * self.codec.config.downsample, width * self.codec.config.downsample

    @property
    def class_names(self) -> list[str] | None:
        return self.metadata.get("class_names")

    # --- generation -------------------------------------------------------------------------------

    def resolve_sampling(self, sampling: Sampling | None) -> Sampling:
        """The given sampling, checked; for None what the checkpoint recommends."""
        if sampling is None:
            return self.sampling()
        arguments.instance("sampling", sampling, Sampling, SAMPLING_WANTED)
        return self.config.check_sampling(sampling)

    def sampling(self, **overrides) -> Sampling:
        """The checkpoint's recommended sampling with overrides, which are fields of `Sampling`;
        None keeps the recommendation.

        Raises:
          UserError: this model cannot draw that way.
        """
        chosen = Sampling.recommended(dict(self.metadata.get("sampling", {})), **overrides)
        return self.config.check_sampling(chosen)

    @property
    def geometry(self) -> Geometry:
        """The model's sizes for a cache under its recommended sampling."""
        return self.geometry_for(self.sampling())

    def geometry_for(self, sampling: Sampling, *, one_slot: bool = True) -> Geometry:
        """The model's sizes for a cache under this sampling: without guidance there are no
        unconditional rows.

        one_slot: as in `Transformer.sequence`. A plan for the other geometry runs, too, and draws
          the same.
        """
        config = self.config
        return Geometry(
            schedule=self.transformer.sequence(one_slot),
            num_layers=config.depth,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            rows_per_image=2 if config.is_guided(sampling) else 1,
            queries_per_head=config.queries_per_head,
        )

    def check_geometry(self, planned: Geometry, sampling: Sampling) -> None:
        """Refuses the geometry of a plan for another model. For another number of rows,
        `engine.build.specify` says what to do.

        Raises:
          UserError: what differs.
        """
        own, whole = (self.geometry_for(sampling, one_slot=flag) for flag in (True, False))
        if planned.schedule == whole.schedule:  # every token of the condition in its own slot
            own = whole
        for name in ("schedule", "num_layers", "num_heads", "head_dim", "queries_per_head"):
            given, wanted = getattr(planned, name), getattr(own, name)
            if given != wanted:
                raise UserError(
                    f"the plan is for another model: its {name} is {given}, this model has "
                    f"{wanted}; plan for this model"
                )

    def with_config(self, config: TransformerConfig) -> "Model":
        """This model under another configuration of the transformer. Weights are shared, not
        copied."""
        if config == self.config:
            return self
        transformer = nnx.merge(*nnx.split(self.transformer))
        transformer.config = config
        return replace(self, parts={**self.parts, "transformer": transformer})

    def with_template(self, aspect: float | str | None, size: str | None) -> "Model":
        """This model for pictures of another shape; `UserError` if there is no such template."""
        cell = self.codec.config.downsample
        return self.with_config(self.config.with_template(aspect, size, cell))

    def with_grid(self, grid: str | Sequence[int] | None) -> "Model":
        """This model for pictures of another grid: height and width in the units that the model
        counts in, as "3x2" or (3, 2). `UserError` if it has no such grids."""
        if grid is None:
            return self
        sides, words = grid, "write height x width, for example 3x2"
        if isinstance(grid, str):
            found = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", grid)
            sides = [int(side) for side in found.groups()] if found else ()
        sides = arguments.integers("grid", sides, words, 2)
        if len(sides) != 2 or min(sides) < 1:
            raise arguments.wrong("grid", grid, words)
        return self.with_config(self.config.with_grid(tuple(map(int, sides))))

    def with_prompt_tokens(self, count: int | None) -> "Model":
        """This model with so many places for the token ids of a prompt; None keeps them.
        `UserError` if it takes none, or an image has no room beside so many."""
        return self if count is None else self.with_config(self.config.with_prompt_tokens(count))

    # --- weights ----------------------------------------------------------------------------------

    @property
    def has_weights(self) -> bool:
        """Whether there are weights to load: a checkpoint's, or those of a model of one's own."""
        preset = registry.PRESETS.get(self.name)
        return self.directory is not None or (preset is not None and preset.weights is not None)

    @property
    def is_abstract(self) -> bool:
        return isinstance(jax.tree.leaves(self.transformer)[0], jax.ShapeDtypeStruct)

    def abstract(self) -> "Model":
        """This model without its weights."""
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), dict(self.parts))
        return replace(self, parts=shapes)

    @jax_settings.pinned()
    def quantized(self, scheme: str = schemes.INT8, *, emulated: bool = False) -> "Model":
        """This model with the matrices of the transformer's layers in 8 bits, with or without
        weights: it takes half the bytes of bfloat16. If it is abstract, `load_weights` will read
        them so, and no device ever holds them in another type. Weights that are there already are
        converted on the host; the model itself keeps its own.

        scheme: one of `varjax.nn.schemes.SCHEMES`.
        emulated: compute what a chip would with products in float32, slowly and on any device.

        Raises:
          UserError: no such scheme, or a matrix whose widths do not fit it, or a model whose
            matrices are in 8 bits already, in another way.
        """
        found = replace(SCHEMES[choose("weights_dtype", scheme, SCHEMES)], emulated=emulated)
        if (held := self.weights_dtype) == scheme:
            return self
        if held in SCHEMES:
            raise UserError(
                f"the matrices are in {held} already: convert the model as it is stored"
            )
        # variables of its own: without a copy both models would share them
        transformer = nnx.merge(*nnx.split(self.transformer), copy=True)
        quantized.convert(transformer, found)
        return replace(self, parts={**self.parts, "transformer": transformer})

    @jax_settings.pinned()
    def load_weights(self, dtype: str | None = None, *, on_disk: bool = False) -> "Model":
        """This model with the weights of its checkpoint. dtype, on_disk: see `load`."""
        dtype = default_dtype() if dtype is None else arguments.dtype("dtype", dtype, DTYPES)
        if self.directory is None and self.has_weights:
            own = registry.own_parts(self.name, self.parts, {"transformer": dtype})
            return replace(self, parts=own).with_config(self.config)
        if self.directory is None:
            raise UserError(
                f"{self.name} is the name of a published model, whose weights are not here: "
                f"`python -m ported_weights --model={self.name} --source=hub` converts them; then "
                "give the name, or the folder"
            )
        arguments.flag("on_disk", on_disk)
        dtypes = {"transformer": dtype, "codec": "float32"}
        in_8_bits = {
            f"transformer/{name}": kernel.get_value().scheme
            for name, kernel in quantized.matrices(self.transformer).items()
            if quantized.is_one(kernel.get_value())
        }
        parts, _ = checkpoint.load(
            self.directory, registry.CATALOGUE, dtypes, in_8_bits=in_8_bits, on_disk=on_disk
        )
        return replace(self, parts=parts).with_config(self.config)


def check_model(model: Model) -> Model:
    """Returns it, or raises `UserError` if it is none."""
    return arguments.instance("model", model, Model, "a model, as varjax.load gives it")


def describe(
    name_or_directory: str | Path | None = None,
    *,
    aspect: float | str | None = None,
    size: str | None = None,
    grid: str | Sequence[int] | None = None,
    prompt_tokens: int | None = None,
) -> Model:
    """An abstract model: the embedded demo (None), another embedded one ("demo-eight",
    "demo-llamagen"), a checkpoint folder, or a published name.

    aspect, size, grid, prompt_tokens: as in `load`.

    Raises:
      UserError: there is no usable checkpoint there, or no such shape.
    """
    if name_or_directory is not None:
        arguments.path("model", name_or_directory)
    if str(name_or_directory) in registry.PRESETS and not Path(name_or_directory).exists():
        name, directory = str(name_or_directory), None
        preset = registry.preset(name)
        family = registry.family(preset.family)
        parts = {n: part.abstract(preset.configs[n]) for n, part in family.tree.items()}
        metadata = {"family": preset.family, "sampling": dict(preset.sampling)}
        if preset.class_names:
            metadata["class_names"] = list(preset.class_names)
    else:
        # a folder of that name comes before an embedded checkpoint
        name = os.path.expanduser(name_or_directory or "demo")
        if name in checkpoint.DEMOS and not (name_or_directory and Path(name).exists()):
            directory = checkpoint.embedded(checkpoint.DEMOS[name], "model.json")
        else:
            name, directory = Path(name).resolve().name, Path(name)
        parts, metadata = checkpoint.describe(directory, registry.CATALOGUE)
        if "transformer" not in parts:
            alone = " and a ".join(parts).replace("_", " ")
            raise UserError(f"{directory} is a {alone} alone: give the checkpoint of a whole model")
    if grid is not None and (aspect is not None or size is not None):
        raise UserError("grid and size (or aspect) exclude each other: both say the shape")
    found = Model(name, parts, metadata, directory).with_template(aspect, size)
    return found.with_grid(grid).with_prompt_tokens(prompt_tokens)


@jax_settings.pinned()
def load(
    path: str | Path | None = None,
    dtype: str | None = None,
    *,
    aspect: float | str | None = None,
    size: str | None = None,
    grid: str | Sequence[int] | None = None,
    prompt_tokens: int | None = None,
    on_disk: bool = False,
    weights_dtype: str | None = None,
) -> Model:
    """Loads a checkpoint folder; without a path the embedded demo (64-pixel fruit, 44 classes).

    Args:
      path: folder written by `python -m ported_weights` or `experiments.train`; or the name of a
        published model that `python -m ported_weights --source=hub` has converted; or of an
        embedded checkpoint: "demo"; "demo-eight", the same fruit in eight scales, on which
        policies are compared; or "demo-llamagen", token by token.
      dtype: "float32" or "bfloat16" for the transformer; None takes float32 on CPU, bfloat16
        elsewhere. The codec is float32.
      aspect, size: height / width and pixel count of the pictures, as 1.5 and "0.25M", for models
        that have templates (Infinity); for Lumina-mGPT a size is "768x512", height x width in
        pixels. None keeps the checkpoint's.
      grid: height and width of the pictures in units of the model, as "3x2": 32 pixels for
        Lumina-mGPT, tokens for Janus-Pro.
      prompt_tokens: places for the token ids of a prompt, for models that read these; shorter ones
        are padded. `varjax.generate` takes as many as its longest prompt has.
      on_disk: leave the weights on disk, for a `Generator` of several devices, which reads shares.
      weights_dtype: "int8" stores the matrices of the transformer's layers in 8 bits, with a scale
        per output channel; they are converted on the host, and products run in `dtype`. "w8a8" and
        "fp8" bring activations into 8 bits as well, on chips that multiply such numbers
        (`varjax.nn.schemes`). "float32" or "bfloat16" say the same as `dtype`. None: as `dtype`.

    Raises:
      UserError: there is no usable checkpoint there, or no such shape; the types contradict each
        other; or this device does not multiply such numbers.
    """
    shape = {"aspect": aspect, "size": size, "grid": grid, "prompt_tokens": prompt_tokens}
    model, dtype = describe(registry.found(path), **shape), computed_in(dtype, weights_dtype)
    if weights_dtype in SCHEMES:
        if why := schemes.why_not_here(SCHEMES[weights_dtype]):
            raise UserError(f"weights_dtype={why}")
        model = model.quantized(weights_dtype)
    return model.load_weights(dtype, on_disk=on_disk)


def computed_in(dtype: str | None, weights_dtype: str | None) -> str | None:
    """The type that activations have; None: the usual one. Weights that are not in 8 bits are
    stored in it.

    `UserError`: two types are given that contradict each other, or no such type.
    """
    if weights_dtype is not None:
        arguments.dtype("weights_dtype", weights_dtype, WEIGHTS_DTYPES)
    if weights_dtype is None or weights_dtype in SCHEMES:
        return dtype
    if dtype is not None and arguments.dtype("dtype", dtype, DTYPES) != weights_dtype:
        raise UserError(
            f"dtype={dtype} and weights_dtype={weights_dtype} contradict each other: products run "
            f"in the type of the weights, unless these are in 8 bits; give one of them"
        )
    return weights_dtype

"""`Model`: named parts (transformer, codec, ...) and what their checkpoint says about them.

A model may be abstract: configurations and shapes without weights. That is enough to plan a cache,
to check every argument and to compile for chips that are not here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import jax
from flax import nnx

from varjax import jax_settings
from varjax.core import arguments
from varjax.core.allocation import Geometry
from varjax.core.errors import UserError, choose
from varjax.core.sampling import Sampling
from varjax.core.sequence import TOKENS
from varjax.core.transformer import Transformer
from varjax.fast import quantized
from varjax.fast.schemes import INT8, SCHEMES
from varjax.models.token_arrays import FORMS, TokenArrays
from varjax.storage import parameters
from varjax.storage.families import CATALOGUE, Family
from varjax.storage.manifest import recommended_sampling
from varjax.storage.published import TransformerConfig

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
        return CATALOGUE.family(self.metadata["family"])

    @property
    def transformer(self) -> Transformer:
        return self.parts["transformer"]  # pyright: ignore[reportReturnType]

    @property
    def codec(self) -> nnx.Module:
        return self.parts["codec"]

    @property
    def networks(self) -> dict[str, nnx.Module]:
        """The networks of generation: transformer and codec."""
        return {"transformer": self.transformer, "codec": self.codec}

    @property
    def weights_dtype(self) -> str:
        """The storage of the matrices of the transformer's layers: one of `SCHEMES`, or a type."""
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
        chosen = recommended_sampling(dict(self.metadata.get("sampling", {})), **overrides)
        return self.config.check_sampling(chosen)

    @property
    def geometry(self) -> Geometry:
        """The model's sizes for a cache under its recommended sampling."""
        return self.geometry_for(self.sampling())

    def geometry_for(self, sampling: Sampling, *, one_slot: bool = True) -> Geometry:
        """The model's sizes for a cache under this sampling: without guidance there are no
        unconditional rows.

        one_slot: as in `Transformer.sequence`. A plan for the other geometry draws the same.
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
        `generation.build.specify` says what to do. `UserError`: what differs."""
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
        """This model under another configuration of the transformer. Weights are shared."""
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
    def is_abstract(self) -> bool:
        return isinstance(jax.tree.leaves(self.transformer)[0], jax.ShapeDtypeStruct)

    def abstract(self) -> "Model":
        """This model without its weights."""
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), dict(self.parts))
        return replace(self, parts=shapes)

    @jax_settings.pinned()
    def quantized(self, scheme: str = INT8, *, emulated: bool = False) -> "Model":
        """This model with the matrices of the transformer's layers in 8 bits, with or without
        weights: it takes half the bytes of bfloat16. If it is abstract, `loading.load_weights` will
        read them so, and no device ever holds them in another type. Weights that are there already
        are converted on the host; the model itself keeps its own.

        scheme: one of `varjax.fast.schemes.SCHEMES`.
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


def check_model(model: Model) -> Model:
    """Returns it, or raises `UserError` if it is none."""
    return arguments.instance("model", model, Model, "a model, as varjax.load gives it")

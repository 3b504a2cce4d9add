"""Models from checkpoints and names: described, or with their weights."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from varjax import jax_settings
from varjax.core import arguments
from varjax.core.errors import UserError
from varjax.fast import quantized
from varjax.fast.schemes import SCHEMES, why_not_here
from varjax.models import registry
from varjax.models.model import Model
from varjax.storage import checkpoint, values
from varjax.storage.parameters import default_dtype

DTYPES = ("float32", "bfloat16")
WEIGHTS_DTYPES = (*DTYPES, *SCHEMES)  # of stored weights


def names() -> list[str]:
    """The names that `varjax.describe` takes: the embedded demos, which `varjax.load` takes as
    well, published sizes, and models of your own that are registered."""
    return [*checkpoint.DEMOS, *registry.PRESETS]


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
        values.path("model", name_or_directory)
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
        (`varjax.fast.schemes`). "float32" or "bfloat16" say the same as `dtype`. None: as `dtype`.

    Raises:
      UserError: there is no usable checkpoint there, or no such shape; the types contradict each
        other; or this device does not multiply such numbers.
    """
    shape = {"aspect": aspect, "size": size, "grid": grid, "prompt_tokens": prompt_tokens}
    model, dtype = describe(registry.found(path), **shape), computed_in(dtype, weights_dtype)
    if weights_dtype in SCHEMES:
        if why := why_not_here(SCHEMES[weights_dtype]):
            raise UserError(f"weights_dtype={why}")
        model = model.quantized(weights_dtype)
    return load_weights(model, dtype, on_disk=on_disk)


def computed_in(dtype: str | None, weights_dtype: str | None) -> str | None:
    """The type that activations have; None: the usual one; weights not in 8 bits are stored in it.

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


def has_weights(model: Model) -> bool:
    """Whether there are weights to load: a checkpoint's, or those of a model of one's own."""
    preset = registry.PRESETS.get(model.name)
    return model.directory is not None or (preset is not None and preset.weights is not None)


@jax_settings.pinned()
def load_weights(model: Model, dtype: str | None = None, *, on_disk: bool = False) -> Model:
    """The model with the weights of its checkpoint. dtype, on_disk: see `load`."""
    dtype = default_dtype() if dtype is None else arguments.dtype("dtype", dtype, DTYPES)
    if model.directory is None and has_weights(model):
        own = registry.own_parts(model.name, model.parts, {"transformer": dtype})
        return replace(model, parts=own).with_config(model.config)
    if model.directory is None:
        raise UserError(
            f"{model.name} is the name of a published model, whose weights are not here: "
            f"`python -m ported_weights --model={model.name} --source=hub` converts them; then "
            "give the name, or the folder"
        )
    arguments.flag("on_disk", on_disk)
    dtypes = {"transformer": dtype, "codec": "float32"}
    in_8_bits = {
        f"transformer/{name}": kernel.get_value().scheme
        for name, kernel in quantized.matrices(model.transformer).items()
        if quantized.is_one(kernel.get_value())
    }
    parts, _ = checkpoint.load(
        model.directory, registry.CATALOGUE, dtypes, in_8_bits=in_8_bits, on_disk=on_disk
    )
    return replace(model, parts=parts).with_config(model.config)

"""A whole training session: codec, then tokens, then transformer, then the finished checkpoint."""

import dataclasses
import os
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from varjax.codecs.autoencoder import ImageCodec, cast
from varjax.errors import UserError, choose
from varjax.models import registry
from varjax.models.transformer import Transformer
from varjax.nn import parameters
from varjax.parallel import processes, shared_folder
from varjax.parallel.training import TrainingMesh
from varjax.storage import checkpoint, manifest
from varjax.storage.atomic import check_new_folder
from varjax.training import classifier_trainer, data, loop
from varjax.training.llamagen_trainer import LlamaGenStage
from varjax.training.settings import TrainingSettings
from varjax.training.var_trainer import VARStage, read_tokens, write_tokens
from varjax.training.vqvae_trainer import VQVAEStage

STAGES = ("vqvae", "var", "both", "classifier")
# {value of `stage`: stages that the session goes through}; others go through codec and transformer
NEEDED = {"vqvae": ("vqvae",), "classifier": ("classifier",)}
MODEL = "model"  # the folder of the finished checkpoint inside the run's folder
TRANSFORMERS = {"var": VARStage, "llamagen": LlamaGenStage}
SAMPLING = {  # {family: recommended sampling}
    "var": {"cfg": 3.0, "top_k": 100, "top_p": 0.95, "more_smooth": False},
    "llamagen": {**registry.LLAMAGEN_SAMPLING, "cfg": 2.0, "top_k": 200},
}


def train(
    settings: TrainingSettings,
    stage: str,
    out: str | os.PathLike,
    quiet: bool = False,
    mesh: TrainingMesh | None = None,
) -> Path | None:
    """Run one of `STAGES` in the folder `out`, and resume what is there.

    mesh: devices to train on; a run may go on with others. None: one.

    Returns the folder of the finished checkpoint, or None after stage "vqvae".

    Many processes call it alike, and share the folder.

    Raises:
      Stopped: the system asked to end, by SIGTERM; the same call goes on.
      UserError: settings or data are wrong, or `out` cannot be used. Nothing is written then.
    """
    with processes.together():
        choose("stage", stage, STAGES)
        needed = NEEDED.get(stage, ("vqvae", "var"))
        mesh = TrainingMesh() if mesh is None else mesh
        if settings.start:
            _check_start(stage, Path(out))
        for name in (stage,) if stage == "var" else needed:  # the codec is there already
            size = getattr(settings, f"{name}_batch_size")
            mesh.check_batch(f"{name}_batch_size", size, settings.accumulate)
        stored = {name: settings.deciding(name) for name in needed}
        loop.check_folder(out, stored)
        if "var" in needed and not _is_complete(settings, Path(out)):  # the codec alone: no model
            check_new_folder(Path(out) / MODEL, replaces=checkpoint.written, flag="out")
    # the folder of the data may have another path on another machine; its content is compared
    own = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    own |= {"data": Path(settings.data).name, "start": settings.start and settings.start.digest}
    processes.agree({"stage": stage, "mesh": str(mesh)} | own)
    with shared_folder.held(
        Path(out),
        f"another process trains in {out}: wait, or choose another folder",
        f"out={out} has to be on a file system that all processes share",
    ):
        with processes.together():
            loop.check_folder(out, stored)  # again: another process may have ended just now
            if "var" in needed and _is_complete(settings, Path(out)):
                return Path(out) / MODEL
        pictures = _pictures(settings, stage, needed, Path(out))
        if stage == "classifier":
            classifier_trainer.train(settings, pictures, Path(out), Path(out) / MODEL, quiet, mesh)
            return Path(out) / MODEL
        return _train(settings, stage, pictures, out, quiet, mesh)


def _pictures(
    settings: TrainingSettings, stage: str, needed: tuple[str, ...], out: Path
) -> data.Dataset:
    """Read the data, and check that it is enough, and the same in all processes."""
    with processes.together():
        if stage == "var" and not (settings.start or _has_codec(out)):
            raise UserError(
                f"out={out} holds no trained codec: run stage=vqvae (or both) with it first"
            )
        pictures = data.load(
            settings.data,
            settings.image_size,
            settings.val_fraction,
            settings.max_images,
            settings.loader,
            settings.shifts,
            settings.max_validation,
        )
        used = (stage,) if stage == "var" else needed
        settings.check_pictures(len(pictures.train), used)
    if processes.count() > 1:
        where = type(pictures.train).__name__  # machines may differ in memory
        processes.agree({"loader": where, "data": pictures.digest()})
    return pictures


def _is_complete(settings: TrainingSettings, out: Path) -> bool:
    """Whether `out` holds a model and nothing is left to train, so that the model stays."""
    if not (out / MODEL / manifest.NAME).is_file():
        return False
    return (out / "var" / loop.CHECKPOINTS / str(settings.var_steps)).is_dir()


def _train(
    settings: TrainingSettings,
    stage: str,
    pictures: data.Dataset,
    out: str | os.PathLike,
    quiet: bool,
    mesh: TrainingMesh,
) -> Path | None:
    """Train codec and transformer (`train`) in a folder that this process holds."""
    pictures = data.with_shifts(pictures, settings.shifts, settings.seed)
    config = settings.transformer(pictures.num_classes)  # raises before the codec is trained
    codec = _codec(settings, stage, pictures, Path(out), quiet, mesh)
    if stage == "vqvae":
        return None
    path, count = Path(out) / "var" / "tokens.npz", len(pictures.train)
    if not processes.say_all(np.array(path.exists()))[0]:
        loop.say(f"var: tokenising {count} pictures and their mirror images", quiet)
        write_tokens(path, codec, pictures, settings)
    with processes.together():
        tokens = read_tokens(path, pictures, config)
    quantizer = getattr(codec, "quantizer", None)
    made, given = TRANSFORMERS[settings.family], None
    if start := settings.start:
        rows, line = start.classes(pictures)
        loop.say(f"var: {line}", quiet)
        given = partial(start.transformer_parameters, rows, settings.seed)
    transformer_stage = made(settings, config, tokens, quantizer, mesh=mesh, given=given)
    state = loop.run(transformer_stage, out, quiet)
    transformer = transformer_stage.model(processes.gathered(state["ema"]))
    with processes.together():
        _save_model(settings, pictures, transformer, codec, Path(out) / MODEL)
    return Path(out) / MODEL


def _codec(
    settings: TrainingSettings,
    stage: str,
    pictures: data.Dataset,
    out: Path,
    quiet: bool,
    mesh: TrainingMesh,
) -> ImageCodec:
    """Return the trained codec: it is trained now or was before, or it is that of the checkpoint
    that the run begins with."""
    start = settings.start
    if stage == "var" and start and not _has_codec(out):
        with processes.together():
            return start.codec_module()
    given = start.codec_parameters if start else None
    codec_stage = VQVAEStage(settings, settings.codec, pictures, mesh=mesh, given=given)
    if stage == "var":
        state = _finished_state(codec_stage, out)
    else:
        state = loop.run(codec_stage, out, quiet, goes_on=stage != "vqvae")
    return codec_stage.model(processes.gathered(state["ema"]))


def _has_codec(out: Path) -> bool:
    """Whether a codec was trained in `out`, at least in part."""
    return (out / "vqvae" / loop.SETTINGS).is_file()


def _check_start(stage: str, out: Path) -> None:
    """`UserError` if a stage cannot begin with a checkpoint in `out`."""
    if stage == "classifier":
        raise UserError("a classifier begins with nothing: leave init out")
    if stage != "var" and not _has_codec(out) and (out / "var" / loop.SETTINGS).is_file():
        raise UserError(
            f"the transformer in out={out} was begun with the codec of init: train the codec in"
            " another folder"
        )


def _finished_state(stage: VQVAEStage, out: str | os.PathLike) -> dict:
    """Return the state after the last step of the codec's training."""
    stored = stage.settings.deciding(stage.name)
    with loop.StageFolder(out, stage.name, stored) as folder:
        state, done = folder.restore(stage.shapes, stage.places(stage.shapes))
    if done < stage.steps:
        raise UserError(
            f"the codec in {folder.path} has {done} of {stage.steps} steps: finish it with"
            " stage=vqvae or both"
        )
    return state


def _save_model(
    settings: TrainingSettings,
    pictures: data.Dataset,
    transformer: Transformer,
    codec: ImageCodec,
    model: Path,
) -> None:
    """Write the folder `model` in one process."""
    if not processes.is_first():
        return
    dtype = jnp.dtype(settings.save_dtype)
    parts = {"transformer": cast(transformer, dtype), "codec": cast(codec, dtype)}
    metadata = {
        "sampling": _sampling(settings),
        "training": {
            "vqvae_steps": settings.vqvae_steps,
            "var_steps": settings.var_steps,
            "pictures": len(pictures.train) // (1 + settings.shifts),
            "shifts": settings.shifts,
            **({"init": settings.start.digest} if settings.start else {}),
            "parameters": {name: parameters.count(part) for name, part in parts.items()},
        },
    }
    if pictures.class_names:
        metadata["class_names"] = list(pictures.class_names)
    family = registry.family(settings.family)
    checkpoint.save(model, family, parts, metadata=metadata, overwrite=True)


def _sampling(settings: TrainingSettings) -> dict:
    """Return the sampling that is recommended for what was trained."""
    if settings.start and "sampling" in settings.start.description:
        return dict(settings.start.description["sampling"])
    found = dict(SAMPLING[settings.family])
    found["top_k"] = min(found["top_k"], settings.vocab_size)
    if settings.family == "llamagen" and not settings.label_drop:  # no null class was trained
        found["cfg"] = 1.0
    return found

"""A whole training session: codec, then tokens, then transformer, then the finished checkpoint; or
a classifier."""

import dataclasses
import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments import processes
from experiments.output import say
from experiments.training import data, loop, sheets
from experiments.training.classifier_trainer import ClassifierStage
from experiments.training.mesh import TrainingMesh
from experiments.training.settings import TrainingSettings
from experiments.training.var_trainer import LlamaGenStage, VARStage, read_tokens, write_tokens
from experiments.training.vqvae_trainer import VQVAEStage
from varjax.codecs.autoencoder import ImageCodec, cast
from varjax.core.errors import UserError, choose
from varjax.generation import hosts
from varjax.models import registry
from varjax.models.judges import JUDGES
from varjax.models.judges.classifier import ClassifierConfig
from varjax.storage import checkpoint, manifest, parameters
from varjax.storage.atomic import check_new_folder, check_place

STAGES = ("vqvae", "var", "both", "classifier")
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
    """Run one of `STAGES` in the folder `out`, and resume what is there. `Stopped` if the system
    asked to end, by SIGTERM: the same call goes on. `UserError` if settings or data are wrong, or
    `out` cannot be used: nothing is written then.

    mesh: devices to train on; a run may go on with others. None: one.

    Returns the folder of the finished checkpoint, or None after stage "vqvae".

    Many processes call it alike, and share the folder.
    """
    with processes.together():
        choose("stage", stage, STAGES)
        check_place(out, flag="out")
        out, mesh = Path(out), TrainingMesh() if mesh is None else mesh
        trained = _trained(settings, stage, out)
        for name in trained:
            if not _is_finished(settings, name, out):
                size = getattr(settings, f"{name}_batch_size")
                mesh.check_batch(f"{name}_batch_size", size, settings.accumulate)
    # the folder of the data may have another path on another machine; its content is compared
    own = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    own |= {"data": Path(settings.data).name, "start": settings.start and settings.start.digest}
    processes.agree({"stage": stage, "mesh": str(mesh)} | own)
    with processes.held(
        out,
        f"another process trains in {out}: wait, or choose another folder",
        f"out={out} has to be on a file system that all processes share",
    ):
        with processes.together():
            stages = (stage,) if stage in ("vqvae", "classifier") else ("vqvae", "var")
            loop.check_folder(out, {name: settings.deciding(name) for name in stages})
            done = "var" in stages and _is_finished(settings, "var", out)
            if done and (out / MODEL / manifest.NAME).is_file():
                return out / MODEL  # it stays, with what was added to it
            if stage != "vqvae":
                check_new_folder(out / MODEL, replaces=checkpoint.written, flag="out")
        pictures = _pictures(settings, trained)
        if stage == "classifier":
            return _train_classifier(settings, pictures, out, quiet, mesh)
        return _train(settings, stage, trained, pictures, out, quiet, mesh)


def _is_finished(settings: TrainingSettings, stage: str, out: Path) -> bool:
    steps = getattr(settings, f"{stage}_steps")
    return (out / stage / loop.CHECKPOINTS / str(steps)).is_dir()


def _trained(settings: TrainingSettings, stage: str, out: Path) -> tuple[str, ...]:
    """The stages that are trained or gone on with. `UserError` if they cannot begin in `out`."""
    has_codec = (out / "vqvae" / loop.SETTINGS).is_file()
    if stage == "classifier":
        if settings.start:
            raise UserError("a classifier begins with nothing: leave init out")
        return (stage,)
    if stage == "var" and not has_codec:
        if not settings.start:
            raise UserError(
                f"out={out} holds no trained codec: run stage=vqvae (or both) with it first"
            )
        return (stage,)  # the codec stays that of the checkpoint
    if settings.start and not has_codec and (out / "var" / loop.SETTINGS).is_file():
        raise UserError(
            f"the transformer in out={out} was begun with the codec of init: train the codec in"
            " another folder"
        )
    return (stage,) if stage == "vqvae" else ("vqvae", "var")


def _pictures(settings: TrainingSettings, trained: tuple[str, ...]) -> data.Dataset:
    """Read the data, and check that it is enough, and the same in all processes."""
    with processes.together():
        pictures = data.load(
            settings.data,
            settings.image_size,
            settings.val_fraction,
            settings.max_images,
            settings.loader,
            settings.shifts,
            settings.max_validation,
        )
        for name in trained:
            size = getattr(settings, f"{name}_batch_size")
            if size > len(pictures.train):
                raise UserError(
                    f"{name}_batch_size={size} given, but there are {len(pictures.train)} training"
                    f" pictures: choose at most {len(pictures.train)}"
                )
    if hosts.count() > 1:
        where = type(pictures.train).__name__  # machines may differ in memory
        processes.agree({"loader": where, "data": pictures.digest()})
    return pictures


def _train_classifier(
    settings: TrainingSettings, pictures: data.Dataset, out: Path, quiet: bool, mesh: TrainingMesh
) -> Path:
    config = ClassifierConfig(
        num_classes=pictures.num_classes,
        image_size=settings.image_size,
        class_names=pictures.class_names,
    )
    stage = ClassifierStage(settings, config, pictures, mesh=mesh)
    network = stage.model(hosts.gathered(loop.run(stage, out, quiet)["ema"]))
    with processes.together():
        if hosts.is_first():
            part, parts = JUDGES.parts["classifier"], {"classifier": network}
            checkpoint.save(out / MODEL, part, parts, dtype="bfloat16", overwrite=True)
    return out / MODEL


def _train(
    settings: TrainingSettings,
    stage: str,
    trained: tuple[str, ...],
    pictures: data.Dataset,
    out: Path,
    quiet: bool,
    mesh: TrainingMesh,
) -> Path | None:
    """Train codec and transformer (`train`) in a folder that this process holds."""
    pictures = data.with_shifts(pictures, settings.shifts, settings.seed)
    config = settings.transformer(pictures.num_classes)  # raises before the codec is trained
    start, given, drawn = settings.start, None, sheets.wanted(settings, mesh)
    if "vqvae" in trained:
        codec_given = (lambda: parameters.named(start.load("codec"))) if start else None
        own = {"mesh": mesh, "given": codec_given}
        draw = sheets.save_reconstructions if drawn else None
        codec_stage = VQVAEStage(settings, settings.codec, pictures, draw=draw, **own)
        state = loop.run(codec_stage, out, quiet, goes_on=stage != "vqvae")
        codec = codec_stage.model(hosts.gathered(state["ema"]))
    else:
        with processes.together():
            codec = jax.device_put(start.load("codec"))
    if stage == "vqvae":
        return None
    path, count = out / "var" / "tokens.npz", len(pictures.train)
    if not processes.say_all(np.array(path.exists()))[0]:
        say(f"var: tokenising {count} pictures and their mirror images", quiet)
        write_tokens(path, codec, pictures, settings)
    with processes.together():
        tokens = read_tokens(path, pictures, config)
    if start:
        rows, line = start.classes(pictures)
        say(f"var: {line}", quiet)
        given = partial(start.transformer_parameters, rows, settings.seed)
    made, quantizer = TRANSFORMERS[settings.family], getattr(codec, "quantizer", None)
    described = _description(settings, pictures, codec)
    draw = sheets.Samples(codec, described).save if drawn else None
    transformer_stage = made(settings, config, tokens, quantizer, mesh=mesh, given=given, draw=draw)
    state = loop.run(transformer_stage, out, quiet)
    transformer = transformer_stage.model(hosts.gathered(state["ema"]))
    with processes.together():
        if hosts.is_first():
            dtype = jnp.dtype(settings.save_dtype)
            parts = {"transformer": cast(transformer, dtype), "codec": cast(codec, dtype)}
            family = registry.family(settings.family)
            checkpoint.save(out / MODEL, family, parts, metadata=described, overwrite=True)
    return out / MODEL


def _description(settings: TrainingSettings, pictures: data.Dataset, codec: ImageCodec) -> dict:
    """Describe the model that is trained, with the sampling that is recommended for it."""
    config, start = settings.transformer(pictures.num_classes), settings.start
    network = registry.family(settings.family).parts["transformer"].module
    parts = {"transformer": parameters.abstract(network, config), "codec": codec}
    sampling = dict(SAMPLING[settings.family])
    sampling["top_k"] = min(sampling["top_k"], settings.vocab_size)
    if settings.family == "llamagen" and not settings.label_drop:  # no null class was trained
        sampling["cfg"] = 1.0
    described = {
        "family": settings.family,
        "sampling": start.description.get("sampling", sampling) if start else sampling,
        "training": {
            "vqvae_steps": settings.vqvae_steps,
            "var_steps": settings.var_steps,
            "pictures": len(pictures.train) // (1 + settings.shifts),
            "shifts": settings.shifts,
            **({"init": start.digest} if start else {}),
            "parameters": {name: parameters.count(part) for name, part in parts.items()},
        },
    }
    if pictures.class_names:
        described["class_names"] = list(pictures.class_names)
    return described

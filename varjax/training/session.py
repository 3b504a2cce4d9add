"""A whole training session: codec, then tokens, then transformer, then the finished checkpoint."""

from pathlib import Path

from varjax.errors import UserError, choose
from varjax.models import parameters
from varjax.storage import checkpoint
from varjax.training import data, loop, run_folder
from varjax.training.settings import Settings
from varjax.training.var_trainer import VARStage, cached_tokens, tokenise
from varjax.training.vqvae_trainer import VQVAEStage

STAGES = ("vqvae", "var", "both")
MODEL = "model"  # the folder of the finished checkpoint inside the run's folder
SAMPLING = {"cfg": 3.0, "top_k": 100, "top_p": 0.95, "more_smooth": False}


def train(
    settings: Settings, stage: str, out, intervals: loop.Intervals, quiet: bool = False
) -> Path | None:
    """Run the stage(s) in the folder `out`, resuming what is there.

    Returns the folder of the finished checkpoint, or None after stage "vqvae".

    Raises:
      UserError: wrong settings or data, or an `out` that cannot be used. Nothing is written then.
    """
    choose("stage", stage, STAGES)
    wanted = ("vqvae", "var") if stage != "vqvae" else ("vqvae",)
    stored = {name: settings.of_stage(name) for name in wanted}
    run_folder.check(out, stored)
    if stage == "var":
        _check_codec(out)
    splits = data.load(
        settings.data, settings.image_size, settings.val_fraction, settings.max_images
    )
    settings.check_pictures(len(splits.train), wanted if stage == "both" else (stage,))
    settings.transformer(splits.num_classes)  # refuses what cannot be, before the codec is trained
    codec_stage = VQVAEStage(settings.codec, settings.vqvae, splits, stored["vqvae"])
    if stage == "var":
        state = _finished_codec(codec_stage, out)
    else:
        state = loop.run(codec_stage, out, intervals, quiet)
    if stage == "vqvae":
        return None
    return _train_transformer(settings, splits, codec_stage.codec(state), out, intervals, quiet)


def _check_codec(out) -> None:
    if not (Path(out) / "vqvae" / run_folder.SETTINGS).is_file():
        raise UserError(
            f"--out={out} holds no trained codec: run --stage=vqvae (or both) with it first"
        )


def _finished_codec(stage: VQVAEStage, out) -> dict:
    """State after the last step of the codec's training."""
    folder = run_folder.StageFolder(out, stage.name, stage.settings)
    try:
        if folder.latest_step() < stage.steps:
            raise UserError(
                f"the codec in {folder.path} has {folder.latest_step()} of {stage.steps} steps:"
                " finish it with --stage=vqvae or both"
            )
        return folder.restore(stage.initial_state())
    finally:
        folder.close()


def _train_transformer(settings: Settings, splits, codec, out, intervals, quiet: bool) -> Path:
    training = settings.var

    def make_tokens():
        loop.say(f"var: tokenising {len(splits.train)} pictures and their mirror images", quiet)
        return tokenise(codec, splits, training.batch_size, training.max_validation)

    tokens = cached_tokens(Path(out) / "var" / "tokens.npz", make_tokens)
    config = settings.transformer(splits.num_classes)
    stage = VARStage(config, training, codec, tokens, settings.of_stage("var"))
    state = loop.run(stage, out, intervals, quiet)
    transformer = stage.transformer(state)
    metadata = {
        "sampling": {**SAMPLING, "top_k": min(SAMPLING["top_k"], config.vocab_size)},
        "training": {
            "vqvae_steps": settings.vqvae_steps,
            "var_steps": settings.var_steps,
            "pictures": len(splits.train),
            "parameters": {
                "transformer": parameters.count(transformer),
                "codec": parameters.count(codec),
            },
        },
    }
    if splits.class_names:
        metadata["class_names"] = list(splits.class_names)
    model = Path(out) / MODEL
    checkpoint.save(
        model,
        family="var",
        parts={"transformer": transformer, "codec": codec},
        metadata=metadata,
        overwrite=True,
    )
    return model

"""Edit a picture: draw the white part of a mask anew, or change what a text says (Infinity).

    python -m experiments.edit --image=FILE --mask=FILE --labels=22 --policy=headkv --out=DIR
    python -m experiments.edit --image=FILE --prompts="a green apple" --checkpoint=DIR \\
        --source_prompt="a red apple" --source_probability=0.9

Several labels or prompts give several edits of the same picture. Writes edit.png (the edits side by
side, without gaps if there is one), reconstruction.png (the picture as the model's image tokenizer
reproduces it) and report.json into --out (default: a new folder under results/).
"""

import hashlib
import sys
from dataclasses import dataclass, replace

import numpy as np

from experiments import images
from experiments.cli import command_line
from experiments.cli.flags import CommandFlags, about
from experiments.flags.condition import ConditionFlags
from experiments.flags.model import ModelFlags
from experiments.flags.policy import PolicyFlags, plan_remarks
from experiments.flags.program import ProgramFlags
from experiments.flags.prompts import plain
from experiments.flags.sampling import SamplingFlags
from experiments.generation import (
    Generation,
    cache_report,
    environment,
    policy_arguments,
    time_report,
)
from experiments.json_text import json_text
from experiments.output import BatchStore, FolderFlags, say
from experiments.prompts.condition import Text
from varjax.core import arguments
from varjax.core.errors import UserError
from varjax.core.plan import CachePlan
from varjax.editing import masks
from varjax.editing.edit import ByText, Edited, Editor, both_texts
from varjax.generation.generator import Generator
from varjax.generation.progress import Progress
from varjax.models.model import Model
from varjax.policies import Policy
from varjax.storage import pictures
from varjax.storage.atomic import new_folder, write_text
from varjax.storage.pictures import to_uint8
from varjax.text import features as text_features

FLAGS = CommandFlags(
    "--image=PICTURE.png --mask=MASK.png --labels=22 --policy=headkv --out=DIR",
    "image mask labels prompts policy budget checkpoint seed out",
    compiles=True,
)
IMAGE = FLAGS.string("image", None, "The picture: a PNG, JPEG or WebP file.", required=True)
MASK = FLAGS.string(
    "mask",
    None,
    "Picture of the same size: white is to be drawn, black is kept (or: transparent is to be "
    "drawn). Models that draw token by token need the white part to be the end of the picture.",
)
FIT = FLAGS.boolean(
    "fit", False, "Cut the middle out of a picture of another size and resize it; the mask, too."
)
PASTE = FLAGS.boolean("paste", True, "Put the picture's own pixels back outside the mask.")
FEATHER = FLAGS.floating(
    "feather",
    0.0,
    "With --paste: pixels outside the mask, 0 to 64, over which the edit fades into the picture.",
)
SOURCE = FLAGS.string(
    "source_prompt", None, "Edit by text, without a mask: what the picture shows as it is."
)
SOURCE_FEATURES = FLAGS.string(
    "source_features", None, "The same as an npz file, beside --text_features (one text for each)."
)
KEEP = FLAGS.integer("keep_scales", 3, "By text: so many scales take the picture's bits (K_c).")
MIX = FLAGS.integer("mix_scales", 8, "By text: bits are mixed up to this scale (K_f).")
PROBABILITY = FLAGS.floating(
    "source_probability",
    None,
    "By text: how likely a mixed bit stays the picture's, 0 to 1. Its paper publishes no number.",
)
MODEL = ModelFlags(FLAGS)
POLICY = PolicyFlags(FLAGS, sizes=False)
CONDITION = ConditionFlags(FLAGS)
SAMPLING = SamplingFlags(FLAGS)
PROGRAM = ProgramFlags(FLAGS)
OUT = FolderFlags(FLAGS)


@dataclass(frozen=True, eq=False, kw_only=True)
class Edit(Generation):
    """A resolved edit.

    condition: of all edits; by text, those of the edits and then those of their pictures.
    pictures: float32 [N, H, W, 3]. drawn: masks [N, H, W]; None: by text.
    """

    policy: Policy
    plan: CachePlan
    pictures: np.ndarray
    drawn: np.ndarray | None
    by_text: ByText | None
    remarks: tuple[str, ...]

    def describe(self) -> dict:
        if self.by_text:
            asked = vars(self.by_text)
        else:
            asked = {
                "mask_sha256": hashlib.sha256(self.drawn[0].tobytes()).hexdigest(),
                "drawn_pixels": float(self.drawn[0].mean()),
                "paste": PASTE.value,
                "feather": FEATHER.value,
            }
        return {
            **super().describe(),
            "policy": self.policy.name,
            "policy_args": policy_arguments(self.policy),
            "budget": self.policy.budget,
            "edit": {
                "image_sha256": hashlib.sha256(self.pictures[0].tobytes()).hexdigest(),
                "edits": len(self.pictures),
                **asked,
            },
        }


def resolve() -> Edit:
    """Check every flag and plan the cache. Compile, allocate and write nothing."""
    model = MODEL.resolve()
    by_text = read_by_text(model)
    target = CONDITION.resolve(model)
    model, condition = MODEL.fitted(model, target)
    if by_text:
        condition = with_source(condition, model)
    picture, drawn, fitted = read_picture(model)
    model, policy = PROGRAM.stored(model), POLICY.resolve()
    policy.check_images(len(condition))
    sampling, program = SAMPLING.sampling(model), PROGRAM.resolve(model)
    plan, calibration = POLICY.plan(policy, model, sampling)
    size, kept = PROGRAM.batch_size(program, model, plan, condition), None
    if by_text and size % 2:
        if PROGRAM.asked.value:
            raise UserError(
                f"--batch_size={size}: an edit by text draws every picture under two texts, choose "
                f"an even number"
            )
        size += 1 if size == 1 else -1
    if drawn is not None:
        drawn = masks.check_masks(model, drawn, len(target))
        with about(MASK):
            kept = masks.kept_tokens(model, drawn)
    return Edit(
        model=model,
        condition=condition,
        sampling=sampling,
        seed=SAMPLING.seed(),
        batch_size=size,
        program=program,
        policy=policy,
        plan=plan,
        pictures=masks.check_pictures(model, picture, len(target)),
        drawn=drawn,
        by_text=by_text,
        remarks=(*plan_remarks(plan, calibration), *fitted, *_mask_remarks(drawn, kept)),
    )


def _mask_remarks(drawn: np.ndarray | None, kept: np.ndarray | None) -> list[str]:
    if drawn is not None and drawn[0].any() and kept[0].all():
        return ["mask      too small: it holds no token by half, so that none is drawn"]
    if drawn is None or drawn[0].any() and not drawn[0].all():
        return []
    if drawn[0].all():
        return ["mask      all white: nothing of the picture is kept"]
    return ["mask      all black: nothing is drawn, edit.png is the picture as it was"]


def read_by_text(model: Model) -> ByText | None:
    """Return how an edit by text goes; None for a mask. `UserError` unless it is one of both."""
    arguments.number("--feather", FEATHER.value, 0, masks.LARGEST_FEATHER)
    for holder, other in ((FEATHER, MASK), (FEATHER, PASTE), (PASTE, MASK)):
        if holder.present and not other.value:
            raise UserError(f"--{holder.name} belongs to --{other.name}: leave it out")
    source = [holder for holder in (SOURCE, SOURCE_FEATURES) if holder.value]
    if bool(MASK.value) == bool(source):
        raise UserError(
            "give either --mask=FILE, or --source_prompt=TEXT to edit by text (Infinity)"
        )
    if MASK.value:
        for holder in (KEEP, MIX, PROBABILITY):
            if holder.present:
                raise UserError(f"--{holder.name} belongs to --source_prompt: leave it out")
        return None
    if len(source) > 1:
        raise UserError("--source_prompt and --source_features exclude each other: keep one")
    if PROBABILITY.value is None:
        raise UserError(
            "--source_probability=P is needed with --source_prompt: how likely a mixed bit stays "
            "the picture's; its paper publishes no number, 0.9 is a start"
        )
    scales = {"keep_scales": KEEP.value, "mix_scales": MIX.value}
    if not MIX.present:  # schedules of small pictures have fewer scales
        scales["mix_scales"] = min(MIX.value, model.geometry.schedule.num_drawn)
    return ByText(probability=PROBABILITY.value, **scales).check(model)


def with_source(condition: Text, model: Model) -> Text:
    """Return the condition with the texts of the pictures as they are behind those of the edits."""
    if path := SOURCE_FEATURES.value:
        config = model.config
        if condition.features is None:
            raise UserError("--source_features belongs to --text_features: give both, or texts")
        found = text_features.load(path, config.text_channels, config.text_maxlen)
        if len(found) * condition.each != len(condition):
            raise UserError(
                f"--source_features={path} holds {len(found)} texts for "
                f"{len(condition.prompts)} edits: give one for each"
            )
        joined = both_texts(condition.features, found.repeat(condition.each))
        return replace(condition, features=joined, prompts=_twice(condition, "source features"))
    if condition.features is not None:
        raise UserError("--source_prompt belongs to --prompts: with features, --source_features")
    prompts, negative = _twice(condition, SOURCE.value), condition.negative
    if negative is not None and len(negative) > 1:
        negative = plain([*negative.texts] * 2, [*negative.names] * 2)
    return replace(condition, prompts=prompts, negative=negative)


def _twice(condition: Text, source: str):
    texts, names = condition.prompts.texts, condition.prompts.names
    more = ["--source_prompt"] * len(texts)
    return plain([*texts, *[source] * len(texts)], [*names, *more])


def read_picture(model: Model) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
    """Return the picture uint8 [H, W, 3], the mask bool [H, W] (None: by text), and remarks."""
    size, remarks = model.pixels, []
    picture = pictures.read_picture(IMAGE.value, f"--image={IMAGE.value}")
    drawn = pictures.read_mask(MASK.value, f"--mask={MASK.value}") if MASK.value else None
    if drawn is not None and drawn.shape != picture.shape[:2]:
        raise UserError(
            f"--mask={MASK.value} has {_size(drawn.shape)} pixels, the picture "
            f"{_size(picture.shape)} (height x width): draw the mask over the picture"
        )
    if picture.shape[:2] != size and not FIT.value:
        raise UserError(
            f"--image={IMAGE.value} has {_size(picture.shape)} pixels (height x width), "
            f"{model.name} draws {_size(size)}: resize it, or add --fit"
        )
    if picture.shape[:2] != size:
        remarks.append(f"image     {_size(picture.shape)} cut and resized to {_size(size)}")
        picture = pictures.fit_picture(picture, size)
        if drawn is not None:  # without levels between
            whole = drawn.astype(np.uint8) * np.uint8(pictures.WHITE)
            drawn = pictures.fit_picture(whole, size, "NEAREST") == pictures.WHITE
    return picture, drawn, remarks


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[0]}x{shape[1]}"


def draw(edit: Edit, generator: Generator) -> Edited:
    """Compile and draw all edits."""
    say(f"{edit.policy.name}: compiling")
    progress = Progress(f"{edit.policy.name}: edit", len(edit.pictures))
    editor = Editor(generator, progress=lambda done, total: done and progress.update(done))
    if edit.by_text:
        features = edit.condition.features
        return editor.by_text(features, edit.pictures, edit.by_text, seed=edit.seed)
    paste, feather = PASTE.value, FEATHER.value
    return editor.in_masks(
        edit.condition, edit.pictures, edit.drawn, seed=edit.seed, paste=paste, feather=feather
    )


def write_edit(edit: Edit, edited: Edited, generator: Generator, store: BatchStore) -> dict:
    """Write all results into the final folder and return the report."""
    kept = edited.kept
    order = edit.plan.geometry.schedule
    report = {
        **edit.describe(),
        **environment(),
        "kv": cache_report(generator),
        "kept_tokens": None if kept is None else float(kept[0].mean()),
        "tokens_of_the_picture": float((edited.tokens == edited.source_tokens).mean()),
        "schedule_text": str(order),
        "remarks": list(edit.remarks),
        "time": time_report(generator),
        "files": ["edit.png", "reconstruction.png", "report.json"],
    }
    with new_folder(store.out, replaces=store.replaces) as out:
        images.save_grid(out / "edit.png", to_uint8(edited.images))
        images.save_grid(out / "reconstruction.png", to_uint8(edited.reconstruction[:1]))
        write_text(out / "report.json", json_text(report))
    return report


def main(argv: list[str]) -> None:
    edit = resolve()
    print(*edit.remarks, sep="\n", end="\n" if edit.remarks else "", file=sys.stderr)
    store = OUT.open(f"{edit.model.name}-{edit.policy.name}-edit", edit.describe())
    edit = edit.encoded()
    model = edit.load_model()
    with store.working():
        generator = edit.generator(model, edit.plan, edit.program.kv_dtype)
        edited = draw(edit, generator)
        report = write_edit(edit, edited, generator, store)
    same = report["tokens_of_the_picture"]
    print(f"{len(edit.pictures)} edits, {same:.1%} of the tokens are the picture's")
    print(f"written to {store.out}")


if __name__ == "__main__":
    command_line.run(main)

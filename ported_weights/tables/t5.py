"""From a published T5 folder (flan-t5) to the text encoder folder of a varjax checkpoint.

The folder holds what Hugging Face publishes: `config.json`, `spiece.model` and the weights in any
of their containers. Only the encoder is taken; full checkpoints also hold a decoder. Layers are
stacked: `encoder.block.N.` is index N on the leading axis.
"""

import contextlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flax import nnx

from ported_weights import rules
from ported_weights.readers import sources
from ported_weights.rules import Ignore, Rule
from varjax.cli.command_line import Progress
from varjax.errors import UserError
from varjax.models import parameters
from varjax.storage.atomic import check_new_folder
from varjax.storage.manifest import parse_json
from varjax.text import encoder as encoder_lib
from varjax.text.t5 import T5Config, T5Encoder
from varjax.text.tokenizer import FILE_NAME, Tokenizer

CONFIG = "config.json"
# Where the weights are, best first: folders are published with several containers side by side.
WEIGHTS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
# Names that tell a T5 encoder's weights from others.
SIGNATURE = ("encoder.final_layer_norm.weight", "encoder.block.0.layer.0.SelfAttention.q.weight")
TABLES = ("shared.weight", "encoder.embed_tokens.weight")  # two names of one embedding
_N = r"encoder\.block\.(\d+)\."
_FEED_FORWARD = (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down"))


def t5_rules(names: Collection[str] = TABLES) -> list[Rule | Ignore]:
    """Rules for an encoder of any size, from a file with these `names`.

    The embedding has two names, of which files hold either or both; `shared` is what the published
    code takes.
    """
    taken, other = TABLES if TABLES[0] in names else reversed(TABLES)
    return [
        Rule(_escaped(taken), "embedding"),
        Ignore(_escaped(other), f"the same table as {taken}"),
        Rule(
            r"encoder\.block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.weight",
            "position_bias",
        ),
        Rule(_N + r"layer\.0\.layer_norm\.weight", "blocks/attention_norm", stack=1),
        Rule(
            _N + r"layer\.0\.SelfAttention\.([qkvo])\.weight",
            r"blocks/\2/kernel",
            "linear",
            stack=1,
        ),
        Rule(_N + r"layer\.1\.layer_norm\.weight", "blocks/feed_forward_norm", stack=1),
        *(
            Rule(
                _N + rf"layer\.1\.DenseReluDense\.{name}\.weight",
                f"blocks/{target}/kernel",
                "linear",
                stack=1,
            )
            for name, target in _FEED_FORWARD
        ),
        Rule(r"encoder\.final_layer_norm\.weight", "final_norm"),
        Ignore(r"decoder\..*", "the decoder of the language model: only the encoder is needed"),
        Ignore(r"lm_head\.weight", "the output layer of the decoder"),
    ]


def _escaped(name: str) -> str:
    return name.replace(".", r"\.")


@dataclass(frozen=True)
class PortedEncoder:
    """What was read: the module (host arrays), the tokenizer's file, names and hashes of files."""

    module: T5Encoder
    tokenizer: Path
    sources: list[dict]

    def write(self, out_folder, *, dtype: str | None = None, overwrite: bool = False) -> None:
        """Write the encoder folder; see `varjax.text.encoder.save`."""
        encoder_lib.save(
            out_folder,
            self.module,
            self.tokenizer,
            metadata={"sources": self.sources},
            dtype=dtype or _storage_dtype(self.module),
            overwrite=overwrite,
        )


def port(
    source_dir,
    out_folder,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Read a published T5 folder and write `out_folder`, such as CHECKPOINT/text_encoder.

    Args:
      source_dir: folder with config.json, spiece.model and weights.
      out_folder: the folder to create.
      dtype: float32 or bfloat16; by default that of the weights (float16 becomes float32).
      overwrite: replace `out_folder` if it exists.
      say: gets a line per result.

    Raises:
      UserError: wrong input of any kind. Nothing is written then.
    """
    check_new_folder(out_folder, overwrite=overwrite)
    read(source_dir, say).write(out_folder, dtype=dtype, overwrite=overwrite)


def read(source_dir, say: Callable[[str], None] = print) -> PortedEncoder:
    """The encoder of a published folder, all of it checked. Raises `UserError` as `port`."""
    return open_folder(source_dir).read(say)


def open_folder(source_dir) -> "PublishedEncoder":
    """A published folder, of which all but the values of the weights is checked, in a moment.
    Raises `UserError` as `port`."""
    folder = Path(source_dir)
    config = read_config(folder)
    Tokenizer(folder / FILE_NAME, config.vocab_size)
    found = PublishedEncoder(folder, config, sources.open_source(_weights(folder), SIGNATURE))
    found.check()
    return found


@dataclass(frozen=True)
class PublishedEncoder:
    """What `open_folder` found: the configuration, and weights that are not read yet."""

    folder: Path
    config: T5Config
    source: sources.Source

    def check(self) -> None:
        """Raise `UserError` unless names and shapes of the weights fit the configuration."""
        tensors = self.source.tensors
        with self._explained():
            rules.check(t5_rules(tensors), tensors, parameters.named(self._module()))

    def read(self, say: Callable[[str], None] = print) -> PortedEncoder:
        """Read the weights. Raises `UserError` if a value is not finite."""
        source = self.source
        progress = Progress("text encoder: tensors", len(source.tensors), every=2.0)

        def report(done: int, total: int) -> None:
            progress.total = total
            if done % 50 == 0 or done == total:
                progress.update(done)

        with self._explained():
            ported = rules.apply(t5_rules(source.tensors), source.tensors, self._module(), report)
        say(
            f"text encoder: {ported.tensors_read} tensors read from {source.path},"
            f" {parameters.count(ported.module):,} parameters; {len(ported.ignored)} of the decoder"
            " and repeated ones ignored"
        )
        files = (self.folder / CONFIG, self.folder / FILE_NAME)
        small = sources.Source(self.folder, {}, files)
        return PortedEncoder(
            ported.module, self.folder / FILE_NAME, small.fingerprints() + source.fingerprints()
        )

    def _module(self) -> T5Encoder:
        return parameters.abstract(lambda: T5Encoder(self.config, rngs=nnx.Rngs(0)))

    @contextlib.contextmanager
    def _explained(self):
        try:
            yield
        except UserError as error:
            file = self.folder / CONFIG
            raise UserError(f"{self.source.path} does not fit {file}: {error}") from error


def read_config(folder: Path) -> T5Config:
    """The configuration of a published folder. `UserError` if there is none or it is unusable."""
    if not folder.is_dir():
        raise UserError(
            f"{folder} is no folder: give that of a published T5 encoder, with {CONFIG},"
            f" {FILE_NAME} and weights"
        )
    file = folder / CONFIG
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} has no {CONFIG}: take the one published with flan-t5") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file} as JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold names and values, as published with flan-t5")
    try:
        return T5Config.from_published(content)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _weights(folder: Path) -> Path:
    """The weights to read: the first container that is there with all of its shards."""
    found = [folder / name for name in WEIGHTS if (folder / name).is_file()]
    return next(filter(_is_whole, found), found[0] if found else folder)


def _is_whole(path: Path) -> bool:
    if not path.name.endswith(".index.json"):
        return True
    try:
        shards = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        return all((path.parent / name).is_file() for name in shards)
    except (ValueError, KeyError, TypeError, AttributeError):
        return True  # the reader of the index says what is wrong with it


def _storage_dtype(module: T5Encoder) -> str:
    """bfloat16 if all weights are; what is float16 or mixed is kept in float32."""
    types = {np.dtype(leaf.dtype).name for leaf in parameters.named(module).values()}
    return "bfloat16" if types == {"bfloat16"} else "float32"

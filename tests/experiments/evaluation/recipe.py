"""Networks whose weights anyone can make again, as the fixtures describe them."""

import contextlib
import functools
import json
import tempfile
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from experiments.evaluation.protocols import PROTOCOLS
from ported_weights.convert import convert_part
from tests.models_under_test import MODELS

FIXTURES = Path(__file__).parents[2] / "fixtures" / "eval"
# {way to 299x299 pixels: a protocol that takes it}, in the order of the fixtures
PATHS = {PROTOCOLS[name].path: PROTOCOLS[name] for name in ("pytorch-fid", "adm", "clean-fid")}


def uniform(name: str, shape, salt: str) -> np.ndarray:
    """float64 in -1..1, decided by the name."""
    seed = zlib.crc32(f"{salt}:{name}".encode())
    return 2 * np.random.RandomState(seed).random_sample(tuple(shape)) - 1


def scaled(name: str, shape, salt: str, gain: float = 1.0) -> np.ndarray:
    return uniform(name, shape, salt) * gain * np.sqrt(6 / np.prod(shape[1:]))


@functools.cache
def arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / f"{name}.npz") as found:
        return dict(found)


@functools.cache
def expected() -> dict:
    return json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))


def features_of(case: dict) -> list[np.ndarray]:
    """Two sets of features by recipe."""
    recipe = case["recipe"]
    each = zip(recipe["names"], recipe["shapes"], recipe["scale"], recipe["offset"], strict=True)
    salt = expected()["salt"]
    return [np.maximum(uniform(n, s, salt) * k + o, 0).astype(np.float32) for n, s, k, o in each]


def inception() -> dict[str, np.ndarray]:
    """The state dict of the network of 1/8 width."""
    said = json.loads((FIXTURES / "inception.json").read_text(encoding="utf-8"))
    found = {}
    for name, shape in said["tensors"].items():
        if len(shape) < 2:
            found[name] = arrays("inception")[f"tensor.{name}"]
            continue
        is_classifier = name == "fc.weight"
        array = scaled(name, shape, said["salt"], said["fc_gain"] if is_classifier else 1.0)
        if is_classifier:
            array -= array.mean(1, keepdims=True)
        found[name] = array.astype(np.float32)
    return found


def lpips_backbone(net: str) -> dict[str, np.ndarray]:
    """The state dict of torchvision's network, without its classifier."""
    said = json.loads((FIXTURES / "lpips.json").read_text(encoding="utf-8"))
    prefix = {"alex": "alexnet.", "vgg": "vgg16."}[net]
    found = {}
    for name, shape in said["backbone"][net].items():
        make = scaled if len(shape) > 1 else lambda *of: 0.1 * uniform(*of)
        found[name] = make(prefix + name, shape, said["salt"]).astype(np.float32)
    return found


def quiet(line: str) -> None:
    pass


@functools.cache
def converted(model: str) -> Path:
    """Folder of a converted network, made once for all processes of a test run."""
    folder = MODELS / "networks" / model
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        made = convert(model, Path(tempfile.mkdtemp(dir=MODELS)))
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(folder)
    return folder


def convert(model: str, folder: Path) -> Path:
    """A converted network in a new folder below this one."""
    source, out, options = folder / f"{model}.safetensors", folder / model, {}
    net = model.removeprefix("lpips-")
    if net != model:
        options["heads_source"] = str(FIXTURES / f"{net}_heads.pth")
    save_file(inception() if net == model else lpips_backbone(net), source)
    convert_part(model, str(source), str(out), say=quiet, **options)
    return out

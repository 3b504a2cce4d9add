"""Models that several test folders use: the reference fixtures, ported to disk once per session,
and their geometry."""

import functools
import pathlib
import tempfile

import numpy as np

from ported_weights.convert import Request, convert
from varjax import generation, policies
from varjax.cache.plan import CachePlan
from varjax.generation import Generator, Model
from varjax.sampling import Sampling

FIXTURES = pathlib.Path(__file__).parent / "fixtures" / "var"
TOKENIZER = {
    "a_k10": "vae_full/vae.pth",
    "b_k6_sharedaln": "vae_small/vae.safetensors",
    "c_k5_nol2norm": "vae_small/vae.safetensors",
}
# Largest differences to the original implementation in float32, from tests/fixtures/README.md.
LOGITS = {"1.5": 6e-4, "4": 1e-3}
CODE_MAP, IMAGE = 3e-5, 5e-5


@functools.cache
def checkpoint_folder(name: str) -> pathlib.Path:
    """A fixture model, converted by the port exactly as a user would."""
    out = pathlib.Path(tempfile.mkdtemp(prefix="varjax-test-")) / name
    tokenizer = FIXTURES / TOKENIZER[name]
    request = Request(
        model="var-custom",
        source=str(FIXTURES / name / "var.safetensors"),
        tokenizer_source=str(tokenizer),
        config=str(FIXTURES / name / "config.json"),
        tokenizer_config=str(tokenizer.parent / "config.json"),
        out=str(out),
    )
    convert(request, say=lambda line: None)
    return out


@functools.cache
def fixture_model(name: str) -> Model:
    return generation.load(checkpoint_folder(name), "float32")


def fixture(name: str, file: str) -> dict[str, np.ndarray]:
    """Arrays of one fixture file."""
    with np.load(FIXTURES / name / f"{file}.npz") as archive:
        return {key: archive[key] for key in archive.files}


def greedy_generator(
    model: Model, policy=None, *, cfg=1.5, batch_size=2, plan: CachePlan | None = None, **options
) -> Generator:
    """Greedy float32 generation with everything kept that a test may look at."""
    options = {"keep_logits": True, "matmul_precision": "highest", **options}
    return Generator(
        model,
        policy or policies.Full(),
        sampling=Sampling(cfg=cfg, greedy=True),
        batch_size=batch_size,
        cache_plan=plan,
        **options,
    )


def unpack_keep_token(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """bool keep_token of an `evict_token_*` fixture."""
    shape = tuple(arrays["keep_token_shape"])
    bits = np.unpackbits(arrays["keep_token_packed"], axis=-1, bitorder="little", count=shape[-1])
    return bits.astype(bool).reshape(shape)

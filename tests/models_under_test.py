"""Models that several test folders use: the reference fixtures of all families, ported to disk once
per session, and what their images are made of."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import tempfile

import numpy as np
from flax import nnx

import varjax
from ported_weights.configurations import PublishedModel
from ported_weights.convert import convert
from varjax import conditions
from varjax.codecs import bsq as bsq
from varjax.core import maps
from varjax.core.allocation import Geometry
from varjax.core.sampling import Sampling
from varjax.core.sequence import Schedule
from varjax.generation.build import Build
from varjax.generation.generator import Generator
from varjax.models import registry
from varjax.models.labels import Labels
from varjax.models.model import Model
from varjax.text.features import TextFeatures
from varjax.text.prompt_ids import PromptIds

FIXTURES = pathlib.Path(__file__).parent / "fixtures" / "var"
# Of all processes of a test run (conftest.py); of one, where a module of tests is run by itself.
MODELS = pathlib.Path(os.environ.get("VARJAX_TEST_FOLDER") or tempfile.mkdtemp(prefix="varjax-"))
TOKENIZER = {
    "a_k10": "vae_full/vae.pth",
    "b_k6_sharedaln": "vae_small/vae.safetensors",
    "c_k5_nol2norm": "vae_small/vae.safetensors",
}
INFINITY_FIXTURES = FIXTURES.parent / "infinity"
INFINITY = {  # weights, tokenizer, its name in configs.json; the transformer's name
    "infinity_a": ("infinity_A.safetensors", "bsqvae_p16_d16.pth", "infinity_A"),
    "infinity_b": ("infinity_B_sharded", "bsqvae_p8_d8.safetensors", "infinity_B_sharded"),
}
LLAMAGEN_FIXTURES = FIXTURES.parent / "llamagen"
LLAMAGEN = {"llamagen_c2i": "gpt_c2i.pt", "llamagen_t2i": "gpt_t2i.safetensors"}
JANUS_FIXTURES, LUMINA_FIXTURES = FIXTURES.parent / "janus", FIXTURES.parent / "lumina"
SMALL = {  # weights of the left under a smaller schedule, which they do not depend on
    "infinity_a_small": ("infinity_a", "1x1;2x2;3x2;6x4;8x5;9x6"),
    "infinity_b_small": ("infinity_b", "1x1;2x2;3x4;4x6"),
}
TABLES = ((0.1, 0.5), (0.3, 0.2))  # budgets of made up tables, and how much they keep
# One small model per family, for tests of what all families share.
FAMILIES = {"var": "b_k6_sharedaln", "infinity": "infinity_a_small"}
# Largest differences to the original implementation in float32, from tests/fixtures/README.md.
LOGITS = {"1.5": 6e-4, "4": 1e-3}
CODE_MAP, IMAGE = 3e-5, 5e-5


@functools.cache
def checkpoint_folder(name: str) -> pathlib.Path:
    """A fixture model, converted by the port exactly as a user would; by one process for all."""
    folder = MODELS / name
    if not folder.exists():
        made = _converted(name, pathlib.Path(tempfile.mkdtemp(dir=MODELS)) / name)
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(folder)
    return folder


def _converted(name: str, out: pathlib.Path) -> pathlib.Path:
    if name in INFINITY:
        return _infinity_folder(name, out)
    if name in LLAMAGEN:
        convert(llamagen_files(LLAMAGEN[name]), str(out), say=lambda line: None)
        return out
    if name in PROMPT_MODELS:
        convert(PROMPT_MODELS[name](), str(out), say=lambda line: None)
        return out
    tokenizer = FIXTURES / TOKENIZER[name]
    files = PublishedModel(
        model="var-custom",
        source=str(FIXTURES / name / "var.safetensors"),
        tokenizer_source=str(tokenizer),
        config=str(FIXTURES / name / "config.json"),
        tokenizer_config=str(tokenizer.parent / "config.json"),
    )
    convert(files, str(out), say=lambda line: None)
    return out


def _infinity_folder(name: str, out: pathlib.Path) -> pathlib.Path:
    source, tokenizer, config = INFINITY[name]
    configs = json.loads((INFINITY_FIXTURES / "configs.json").read_text())
    files = {}
    for kind, entry in (("config", config), ("tokenizer_config", tokenizer.split(".")[0])):
        content = configs[entry] | ({"size": "0.06M"} if kind == "config" else {})
        files[kind] = out.parent / f"{kind}.json"
        files[kind].write_text(json.dumps(content))
    published = PublishedModel(
        model="infinity-custom",
        source=str(INFINITY_FIXTURES / source),
        tokenizer_source=str(INFINITY_FIXTURES / tokenizer),
        config=str(files["config"]),
        tokenizer_config=str(files["tokenizer_config"]),
    )
    convert(published, str(out), say=lambda line: None)
    return out


def llamagen_files(weights: str) -> PublishedModel:
    """A LlamaGen with weights among the fixtures."""
    configs = str(LLAMAGEN_FIXTURES / "configs.json")
    return PublishedModel(
        model="llamagen-custom",
        source=str(LLAMAGEN_FIXTURES / weights),
        tokenizer_source=str(LLAMAGEN_FIXTURES / "vq.safetensors"),
        config=configs,
        tokenizer_config=configs,
    )


def janus_files() -> PublishedModel:
    """A Janus-Pro, whose folder holds everything."""
    folder = JANUS_FIXTURES / "janus_tiny"
    config = str(folder / "config.json")
    return PublishedModel(model="janus-custom", source=str(folder), config=config)


def lumina_files() -> PublishedModel:
    """A Lumina-mGPT, whose image tokenizer has a file of its own."""
    return PublishedModel(
        model="lumina-custom",
        source=str(LUMINA_FIXTURES / "lumina_tiny.safetensors"),
        tokenizer_source=str(LUMINA_FIXTURES / "lumina_tiny_vqgan.ckpt"),
        config=str(LUMINA_FIXTURES / "lumina_tiny_config.json"),
    )


PROMPT_MODELS = {"janus_tiny": janus_files, "lumina_tiny": lumina_files}


# Models that draw token by token, small enough to run with every policy.
PROMPT_SHAPES = {
    "janus_small": ("janus_tiny", (6, 6), 14),
    "lumina_small": ("lumina_tiny", (3, 2), 15),
}
GROUPS = "lumina_groups"  # 4 query heads for 2 heads of keys, norms after the branches
FEW_NORMS = "lumina_few_norms"  # 4 heads, and 2 sets of weights of their norms
LUMINA_OPTIONS = {
    GROUPS: {"num_key_value_heads": 2, "swin_norm": True, "model_parallel_size": 2},
    FEW_NORMS: {"model_parallel_size": 2},
}
TOKEN_MODELS = ("llamagen_c2i", *PROMPT_SHAPES, GROUPS)


def _random_lumina(name: str) -> Model:
    """A Lumina-mGPT of random numbers with options of the 34B family."""
    family = registry.family("lumina")
    published = json.loads((LUMINA_FIXTURES / "lumina_tiny_config.json").read_text())
    given = published | {"units": [3, 2], "prompt_tokens": 15}
    given["model"] |= LUMINA_OPTIONS[name]
    config = family.parts["transformer"].read(given)
    transformer = family.parts["transformer"].module(config, rngs=nnx.Rngs(0))
    # the initial weights give logits that are almost alike
    for parameter in (transformer.token_embedding, transformer.head.kernel):
        parameter.set_value(20 * parameter[...])
    parts = {"transformer": transformer, "codec": fixture_model("lumina_tiny").codec}
    sampling = registry.lumina_sampling(config)
    return Model(name, parts, {"family": "lumina", "sampling": sampling})


@functools.cache
def fixture_model(name: str) -> Model:
    if name in LUMINA_OPTIONS:
        return _random_lumina(name)
    if name in PROMPT_SHAPES:
        of, grid, slots = PROMPT_SHAPES[name]
        return fixture_model(of).with_grid(grid).with_prompt_tokens(slots)
    if name not in SMALL:
        return varjax.load(checkpoint_folder(name), "float32")
    name, text = SMALL[name]
    model, schedule = fixture_model(name), Schedule.parse(text)
    config = dataclasses.replace(model.config, schedule=schedule, rope_map=schedule.final_map)
    return model.with_config(config)


def fixture(name: str, file: str) -> dict[str, np.ndarray]:
    """Arrays of one fixture file of VAR."""
    return _arrays(FIXTURES / name / f"{file}.npz")


def infinity_fixture(file: str) -> dict[str, np.ndarray]:
    return _arrays(INFINITY_FIXTURES / f"{file}.npz")


def llamagen_fixture(file: str) -> dict[str, np.ndarray]:
    return _arrays(LLAMAGEN_FIXTURES / f"{file}.npz")


def janus_fixture(file: str) -> dict[str, np.ndarray]:
    return _arrays(JANUS_FIXTURES / f"{file}.npz")


def lumina_fixture(file: str) -> dict[str, np.ndarray]:
    return _arrays(LUMINA_FIXTURES / f"{file}.npz")


def _arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(path) as archive:
        return {key: archive[key] for key in archive.files}


def condition(model: Model, numbers) -> Labels | TextFeatures | PromptIds:
    """What some images of a model are made of: their numbers stand for labels, for texts cut out of
    a fixture's, or for prompts; every second one is shorter than the others."""
    numbers = np.asarray(numbers, np.int32)
    if model.condition == "labels":
        return Labels.of(numbers % model.num_classes, model.num_classes)
    if model.condition == "prompt_ids":
        prompts = [prompt(model, i) for i in range(16)]
        return conditions.resolve(model, prompt_ids=[prompts[n % 16] for n in numbers])
    width = model.config.text_channels
    rows = np.random.default_rng(0).normal(size=(64, width)).astype(np.float32)
    lens = np.array([8 + 4 * (i % 2) for i in range(16)])
    kv = np.concatenate([np.roll(rows, -3 * i, axis=0)[:n] for i, n in enumerate(lens)])
    return TextFeatures(kv=kv, lens=lens, numbers=numbers % 16)


def prompt(model: Model, number: int) -> np.ndarray:
    """Token ids of a prompt; ids from 200 on stand for text in every fixture that has so many."""
    config = model.config
    end = list(getattr(config, "opening", (config.text_vocab_size - 1,)))
    length = config.prompt_tokens - len(end) - 3 * (number % 2)
    first = min(200, config.text_vocab_size // 2)
    most = config.text_vocab_size - 1
    text = np.random.default_rng(number).integers(first, most, length)
    text[np.isin(text, [*getattr(config, "token_ids", ()), end[0]])] = most - 1  # no image
    return np.concatenate([text, end]).astype(np.int32)


def learned_tables(geometry: Geometry) -> dict[float, np.ndarray]:
    """Tables as `experiments.learn` writes them, of random probabilities that fall from scale to
    scale."""
    schedule, rng = geometry.schedule, np.random.default_rng(0)
    shape = (geometry.num_layers, geometry.num_heads, schedule.persistent_tokens)
    kept = np.cumprod(rng.random((schedule.num_scales - 1, *shape)), axis=0)
    return {budget: np.round(255 * kept**power).astype(np.uint8) for budget, power in TABLES}


def given(model: Model, numbers) -> dict:
    """The argument of the Python API that gives `condition`."""
    if model.condition == "labels":
        return {"labels": list(numbers)}
    return {"prompt_ids": [prompt(model, n) for n in numbers]}


def arrays_of(model: Model, numbers):
    """What `Generator.run_batch` takes for the images `numbers`."""
    return condition(model, numbers).take(np.arange(len(numbers)))


def greedy_generator(model: Model, policy="full", *, cfg=1.5, batch_size=2, **options) -> Generator:
    """Greedy float32 generation with everything kept that a test may look at; in one segment, which
    compiles fastest and gives the same tokens."""
    exact = {"matmul_precision": "highest", "decode_dtype": "float32"}
    options = {"keep_logits": True, "segments": 1, **exact, **options}
    sampling = Sampling(cfg=cfg, greedy=True)
    return built(model, policy, sampling=sampling, batch_size=batch_size, **options)


def built(*arguments, **options) -> Generator:
    """A generator, of which some options are those of its `Build`."""
    names = {field.name for field in dataclasses.fields(Build)} & options.keys()
    build = Build(**{name: options.pop(name) for name in names})
    return Generator(*arguments, **options, build=build)


# Segments of six scales with the last one alone: it then stores nothing, so the final state holds
# what it saw. Sharing a segment, it evicts everything, as nothing reads the cache after it.
LAST_ALONE = 3


def sums_of_bits(bits, schedule: Schedule) -> list:
    """Latent maps [B, P, Q, C] after every scale of bits [B, L, C] of a BSQ-VAE, by themselves."""
    total, sums = 0, []
    for (h, w), start, end in zip(schedule.maps, schedule.starts, schedule.ends, strict=True):
        part = bsq.codes(bits[:, start:end], bits.shape[-1]).reshape(len(bits), h, w, -1)
        total = total + maps.resize_bilinear(part, schedule.final_map)
        sums.append(total)
    return sums


def unpack_keep_token(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """bool keep_token of an `evict_token_*` fixture."""
    shape = tuple(arrays["keep_token_shape"])
    bits = np.unpackbits(arrays["keep_token_packed"], axis=-1, bitorder="little", count=shape[-1])
    return bits.astype(bool).reshape(shape)

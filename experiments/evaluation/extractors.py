"""Networks whose features are compared, by name, and the programs that run them over pictures."""

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Real

from experiments import processes
from experiments.evaluation import protocols
from experiments.evaluation.protocols import Protocol
from varjax.core.errors import UserError, about
from varjax.generation import hosts
from varjax.generation.mesh import IMAGES, MeshSpec, make_mesh, mesh_spec
from varjax.generation.sharding import place
from varjax.models.judges import JUDGES, classifier, inception, lpips
from varjax.models.model import Model
from varjax.storage import checkpoint, parameters

USUAL_BATCH, CPU_BATCH = 64, 16  # the network of FID takes about 1 GiB for 16 pictures on CPU
PUBLISHED = "6726825d"  # how the SHA-256 of the published network of FID begins
INCEPTION_FILE = "pt_inception-2015-12-05-6726825d.pth"
WHERE_INCEPTION = (
    f"download {INCEPTION_FILE} (release fid_weights of github.com/mseitzer/pytorch-fid), convert"
    f" it with `python -m ported_weights --model=inception-fid --source={INCEPTION_FILE} --out=DIR`"
    " and name DIR"
)
WHERE_LPIPS = (
    "download torchvision's alexnet-owt-7be5be79.pth and alex.pth (lpips/weights/v0.1 of"
    " github.com/richzhang/PerceptualSimilarity), convert them with `python -m ported_weights"
    " --model=lpips-alex --source=alexnet-owt-7be5be79.pth --heads_source=alex.pth --out=DIR` and"
    " name DIR"
)

DEMO_CLASSIFIER = ("demo_classifier", "classifier.json")  # what comes with varjax
WHERE_CLASSIFIER = (
    "train one with `python -m experiments.train --stage=classifier --data=PICTURES --out=RUN` and"
    " name RUN/model"
)


@dataclass(frozen=True, eq=False)
class Network:
    """A network with its weights.

    identity: what reports say about it; `sha256` is the digest of its parameters.
    apply: traced: (module, arrays [B, ...]) -> {feature: [B, n]}.
    widths: n of every feature.
    largest_batch: (height, width) -> how many pictures at a time memory allows.
    check_size: (height, width); raises `UserError` for pictures that the network cannot take.
    """

    module: nnx.Module
    identity: Mapping
    apply: Callable
    widths: Mapping[str, int]
    largest_batch: Callable[[int, int], int]
    check_size: Callable[[int, int], None] = lambda height, width: None


def _load(folder: str | Path, part: str, where: str) -> tuple[nnx.Module, dict]:
    """A network of `JUDGES` and what identifies it. where: where to get it, for the message."""
    if not Path(folder).exists():
        raise UserError(f"there is no folder {folder}: {where}")
    parts, content = checkpoint.load(Path(folder), JUDGES, {part: "float32"})
    module = parts[part]
    digest = hashlib.sha256()
    for name, array in sorted(parameters.named(module).items()):
        digest.update(f"{name} {array.shape}\n".encode() + np.asarray(array).tobytes())
    return module, {"sha256": digest.hexdigest(), "sources": content.get("sources") or []}


def open_inception(folder: str | Path, protocol: Protocol) -> Network:
    """The network of FID on pictures that are prepared as a protocol does. `UserError` if there is
    no such checkpoint, with the place to get it."""
    module, identity = _load(folder, "inception", WHERE_INCEPTION)
    files = [str(source.get("sha256", "")) for source in identity["sources"]]
    published = any(digest.startswith(PUBLISHED) for digest in files)
    config = module.config
    widths = {
        "pool": config.block_width("Mixed_7c", 0),
        "spatial": inception.SPATIAL_CHANNELS * inception.SPATIAL_SIDE**2,
        "logits": config.num_classes,
    }
    return Network(
        module,
        {"name": "inception", **identity, "published_weights": published},
        lambda network, images: network(protocol.normalise(protocol.resized(images))),
        widths,
        protocols.batch_size,
    )


def open_classifier(folder: str | Path | None = None) -> Network:
    """A classifier that `experiments.train` has trained, from its folder; None: the embedded one,
    which knows the demo's classes. `UserError`: there is no such checkpoint."""
    folder = folder or checkpoint.embedded(*DEMO_CLASSIFIER)
    module, identity = _load(folder, "classifier", WHERE_CLASSIFIER)
    config = module.config

    def apply(network, images):
        features = network.features(_unit(images))
        return {"pool": features, "logits": network.logits(features)}

    return Network(
        module,
        {"name": f"classifier of {config.num_classes} classes", "sha256": identity["sha256"]},
        apply,
        {"pool": config.widths[-1], "logits": config.num_classes},
        classifier.batch_size,
        partial(classifier.check_size, config),
    )


def classifier_of(model: Model) -> Network | None:
    """The classifier that judges the pictures of a model: the one in the folder `classifier` of its
    checkpoint, else the embedded one if the model has its classes and its size. None: there is no
    such classifier. `UserError` if the checkpoint's own classifier takes pictures of another size
    or knows other classes."""
    if not model.num_classes:
        return None
    size = model.pixels
    if model.directory and (own := model.directory / "classifier").is_dir():
        found = open_classifier(own)
        with about(own):
            found.check_size(*size)
            if found.widths["logits"] != model.num_classes:
                known = f"it knows {found.widths['logits']} classes, {model.name} has"
                raise UserError(f"{known} {model.num_classes}: train one on the model's classes")
        return found
    with contextlib.suppress(UserError):  # it is not installed
        embedded = checkpoint.embedded(*DEMO_CLASSIFIER)
        config = checkpoint.describe(embedded, JUDGES)[0]["classifier"].config
        side, names = config.image_size, tuple(model.class_names or ())
        if size == (side, side) and config.class_names == names:
            return open_classifier(embedded)
    return None


def open_lpips(folder: str | Path) -> Network:
    """The network of LPIPS, which compares pairs. `UserError`: there is no such checkpoint."""
    module, identity = _load(folder, "lpips", WHERE_LPIPS)
    net = module.config.net
    return Network(
        module,
        {"name": f"lpips {net}, version 0.1", **identity},
        lambda network, a, b: {"layers": network.layers(_unit(a), _unit(b))},
        {"layers": len(lpips.NETS[net])},
        partial(lpips.batch_size, module.config),
        partial(lpips.check_size, module.config),
    )


def _unit(images):
    return images.astype(np.float32) / 255


class CompiledNetwork:
    """A network compiled for batches of pictures of one size, over the devices of a mesh.

    size: (height, width).
    batch_size: pictures per call, on all devices together; it is lowered to what memory allows.
    """

    def __init__(
        self, network: Network, size: tuple[int, int], batch_size: int, mesh: MeshSpec | None = None
    ):
        mesh = mesh or MeshSpec()
        each = min(batch_size // mesh.data, network.largest_batch(*size))
        shared = mesh.data > len(jax.local_devices())  # all processes run one program
        if shared:  # they may have other amounts of memory
            each = int(processes.say_all(np.array(each)).min())
        self.batch_size = each * mesh.data
        self._mesh = make_mesh(vars(mesh), jax.devices() if shared else jax.local_devices())
        self._weights = place(network.module, NamedSharding(self._mesh, P()))
        images = mesh_spec(P(IMAGES), self._mesh.axis_names)
        self._place = NamedSharding(self._mesh, images)

        def program(module, *arrays):  # every device runs the program of one on its pictures
            on_devices = jax.shard_map(
                network.apply,
                mesh=self._mesh,
                in_specs=(P(), *(images for _ in arrays)),
                out_specs=images,
                check_vma=False,
            )
            return on_devices(module, *arrays)

        self._run = jax.jit(program)

    def start(self, *arrays: Real[np.ndarray, "n H W 3"]) -> dict[str, jax.Array]:
        """Features of up to `batch_size` pictures, which the device may still be computing. A
        smaller batch is filled up, so that there is one program; `over` drops what was added."""
        missing = self.batch_size - len(arrays[0])
        padded = [np.pad(a, ((0, missing), *((0, 0),) * (a.ndim - 1))) for a in arrays]
        return self._run(self._weights, *place(tuple(padded), self._place))

    def over(self, batches: Iterator[tuple[np.ndarray, ...]]) -> Iterator[dict[str, np.ndarray]]:
        """Features of every batch. While the device computes a batch, the next one is read."""
        ahead: list[tuple[dict[str, jax.Array], int]] = []
        for arrays in itertools.chain(batches, [None]):
            begun = [(self.start(*arrays), len(arrays[0]))] if arrays is not None else []
            for found, count in ahead:
                whole = hosts.gathered(found)
                yield {name: np.asarray(array)[:count] for name, array in whole.items()}
            ahead = begun

"""Names with wrappers of modules in them, by-products of training, and shards that others read."""

import gzip
import json

import chex
import numpy as np
import pytest
from safetensors.numpy import save_file

from ported_weights.readers.sources import open_source
from ported_weights.readers.wrappers import WRAPPERS, unwrapped
from varjax.core.errors import UserError

FAMILIES = ["var", "infinity", "llamagen", "janus", "lumina"]


@pytest.mark.parametrize("family", FAMILIES)
def test_wrappers_at_any_place_of_any_published_name(fixtures_dir, family):
    """Published names stay, Infinity's `block_chunks.0.module.0` among them."""
    models = json.loads(gzip.open(fixtures_dir / family / "released_shapes.json.gz").read())
    names = {name for shapes in models.values() for name in shapes}
    for name in names | {"block_chunks.3.module.0.sa.proj.weight"}:
        assert unwrapped(name) == name
        parts = name.split(".")
        for place in range(len(parts)):
            for wrapper in WRAPPERS:
                wrapped = [*parts[:place], wrapper, "_orig_mod", *parts[place:]]
                assert unwrapped(".".join(wrapped)) == name


def test_an_averaged_wrapped_model_with_its_losses(tmp_path, torch_zip):
    """Each kind of thing is said once, and chosen among state dicts by names without wrappers."""
    weights = {"blocks.0.w": np.ones(2, "f4"), "blocks.1.w": np.zeros(3, "f4")}
    saved = {
        "n_averaged": np.array(5),
        "module.blocks.0._orig_mod.w": weights["blocks.0.w"],
        "module._fsdp_wrapped_module.blocks.1._checkpoint_wrapped_module.w": weights["blocks.1.w"],
        "module.loss.discriminator.main.0.weight": np.ones(4, "f4"),
        **{f"loss.perceptual_loss.lin{i}.model.1.weight": np.ones(1, "f4") for i in range(5)},
    }
    other = {"blocks.0.loss.w": np.ones(1, "f4")}  # no by-product: not at the beginning
    path = torch_zip.save(tmp_path / "w.pth", {"model": saved, "ema": other})
    source = open_source(path, ["blocks.0.w"])
    chex.assert_trees_all_equal({n: t.read() for n, t in source.tensors.items()}, weights)
    assert source.taken == (
        "model (prefixes of wrappers taken off: _checkpoint_wrapped_module, _fsdp_wrapped_module,"
        " _orig_mod, module; by-products of training passed over: n_averaged,"
        " module.loss.discriminator.main.0.weight, loss.perceptual_loss.lin0.model.1.weight,"
        " and 4 more)"
    )
    assert list(open_source(path, (), "ema").tensors) == ["blocks.0.loss.w"]


def test_two_names_that_are_one_without_wrappers(tmp_path):
    names = ["a.module.w", "a.w", "_orig_mod.a.w", "b"]
    save_file({name: np.ones(1, "f4") for name in names}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="the same without wrappers") as caught:
        open_source(tmp_path / "w.safetensors")
    assert all(name in str(caught.value) for name in names[:3])


@pytest.mark.parametrize("where", ["", "pytorch_model_fsdp_0"])
def test_shards_of_torch_distributed_checkpoint(tmp_path, torch_zip, where):
    """Beside them Lightning writes `meta.pt`; Accelerate writes them into a folder of their own."""
    folder = tmp_path / where
    folder.mkdir(exist_ok=True)
    for rank in range(2):
        (folder / f"__{rank}_0.distcp").write_bytes(b"PK\x03\x04")
    extra = [] if where else [torch_zip.save(tmp_path / "meta.pt", {"w": np.ones(1, "f4")})]
    for path in (tmp_path, folder, folder / "__0_0.distcp"):
        with pytest.raises(UserError, match=r"\(\.distcp\), in .*dcp_to_torch_save") as caught:
            open_source(path)
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    for path in extra:
        assert list(open_source(path).tensors) == ["w"]  # by its own name it is a file like others

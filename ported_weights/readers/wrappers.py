"""Names of tensors without what wrappers of modules and training scripts add to them."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from varjax.core.errors import UserError, some

# Attributes that hold the wrapped module: of data parallelism and averaged models, torch.compile,
# FSDP and its older form, checkpointing of activations, and Lightning's strategies.
WRAPPERS = frozenset(
    "module _orig_mod _fsdp_wrapped_module _fpw_module _checkpoint_wrapped_module"
    " _forward_module".split()
)
# The number of averaged steps; discriminators and perceptual losses.
_BY_PRODUCTS = re.compile(r"(?:.+\.)?n_averaged|loss\..+")
# Infinity's layers come in chunks, and a chunk's list of layers is itself called `module`.
_CHUNKS = re.compile(r"(?<![^.])block_chunks\.(\d+)\.(?=\d)")


def unwrapped(name: str) -> str:
    """Return a tensor's name without wrappers, wherever they stand before its last part."""
    *places, own = name.split(".")
    kept = ".".join([*(place for place in places if place not in WRAPPERS), own])
    if len(kept) == len(name):
        return name
    return _CHUNKS.sub(r"block_chunks.\1.module.", kept)


def without_wrappers(path: Path, tensors: Mapping) -> tuple[dict, str]:
    """Return {name: tensor} without wrappers and by-products, and what was left out, in words.
    `UserError` if two tensors differ only in the wrappers of their names."""
    names: dict[str, list[str]] = {}
    for name in tensors:
        names.setdefault(unwrapped(name), []).append(name)
    passed = [n for new, old in names.items() if _BY_PRODUCTS.fullmatch(new) for n in old]
    names = {new: old for new, old in names.items() if not _BY_PRODUCTS.fullmatch(new)}
    if twice := [some(old, 4, " and ") for old in names.values() if len(old) > 1]:
        raise UserError(
            f"{path} holds tensors whose names are the same without wrappers"
            f" ({', '.join(sorted(WRAPPERS))}): {some(twice, 4)}; save one of each"
        )
    renamed = {old[0]: new for new, old in names.items() if old[0] != new}
    found = {new: tensors[old[0]] for new, old in names.items()}
    said = []
    if renamed:
        pairs = [(Counter(a.split(".")), Counter(b.split("."))) for a, b in renamed.items()]
        off = {place for before, after in pairs for place in before - after}
        said.append(f"prefixes of wrappers taken off: {', '.join(sorted(off))}")
    if passed:
        said.append(f"by-products of training passed over: {some(passed, 3)}")
    return found, "; ".join(said)

"""Sizes of layers under ScaleKV: published budget files, and budgets of our own made in
the same manner."""

import hashlib

import numpy as np

from varjax.core import allocator
from varjax.core.allocation import Geometry
from varjax.core.errors import UserError
from varjax.policies import capacities
from varjax.storage import ordinary
from varjax.storage.manifest import parse_json

LARGEST_FILE = 16 * 2**20  # bytes
LAYERS_PER_DRAFTER = 16  # the published files have 2 drafters in 32 layers and 3 in 40


def read_budgets(path: str) -> tuple[dict[int, dict[str, int]], str]:
    """(entries of a published file by the number of their scale, its SHA-256): {"Scale 9": {"Block
    0": 1, "Block 1": 0, ..., "Max": 920, "Min": 632, "Limit": 921}, ...}.

    "Scale n" is what a layer holds when our scale n - 1 starts: Max for layers marked 1 (drafters),
    Min for the others. Before the first entry nothing is dropped. Limit, if given, is what a
    drafter would hold without dropping; it tells whether the schedule is the right one.
    """
    try:
        data = ordinary.read_file(path, LARGEST_FILE)
        content = parse_json(data.decode("utf-8"))
        entries = {int(k.removeprefix("Scale ")): dict(v) for k, v in content.items()}
        numbers = [n for entry in entries.values() for n in entry.values()]
    except OSError as error:
        raise UserError(f"budgets={path}: cannot read the file: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError):
        raise UserError(
            f"budgets={path} is no budget file of ScaleKV: a JSON object with an entry "
            f'"Scale n" for each scale'
        ) from None
    if not entries or any(type(n) is not int or n < 0 for n in numbers):
        raise UserError(f"budgets={path}: entries must be whole numbers from 0 on")
    return dict(sorted(entries.items())), hashlib.sha256(data).hexdigest()


def published_tokens(
    path: str, entries: dict[int, dict[str, int]], geometry: Geometry
) -> np.ndarray:
    """int [K, L]: tokens per head when each scale starts, by a file's entries (`read_budgets`).
    `UserError`: the file is for another model."""

    def require(fits: bool, reason: str) -> None:
        if not fits:
            raise UserError(
                f"budgets={path} is not for this model: {reason}; calibrate this model and give "
                f"the calibration instead"
            )

    schedule, last = geometry.schedule, geometry.schedule.num_scales
    first, blocks = min(entries), [f"Block {layer}" for layer in range(geometry.num_layers)]
    require(
        sorted(entries) == list(range(first, last + 1)) and first > 1,
        f'it has entries for "Scale n" with n = {", ".join(map(str, entries))}; this model of '
        f"{last} scales needs consecutive ones that end at {last}",
    )
    result = np.repeat(np.array(schedule.starts)[:, None], geometry.num_layers, 1)
    before = schedule.starts[first - 2]
    for number, entry in entries.items():
        limit = before + schedule.tokens[number - 2]
        named, given = {k for k in entry if k.startswith("Block ")}, entry.get("Limit", limit)
        sound, scale = 1 <= entry.get("Min", 0) <= entry.get("Max", 0), f"scale {number}"
        require(named == set(blocks), f"{scale} names other blocks than {len(blocks)} layers")
        require(sound, f"{scale} needs Max and Min, with Max >= Min >= 1")
        require(given == limit, f"{scale} counts on {given} tokens, this schedule has {limit}")
        before = entry["Max"]
        result[number - 1] = np.where([entry[block] for block in blocks], before, entry["Min"])
    return result


def own_tokens(
    geometry: Geometry,
    budget: float,
    selectivity: np.ndarray,
    drafters: int,
    refiner_share: float,
    *,
    peak: bool,
) -> np.ndarray:
    """int [K, L]: at each scale the first drafters keep everything, the others share the rest.

    selectivity: float [L], low for layers that look back at much.
    drafters: the most layers that keep everything; 0: as many as the published files have, one in
      16 layers, rounded up.
    refiner_share: what the others keep at least, relative to the mean over layers. If that forbids
      the wanted number of drafters, fewer keep everything; if it forbids one, that one is cut.
    peak: the budget holds after every layer, also where drafters have grown and later layers have
      not shrunk yet; otherwise when a scale starts.
    """
    layers = geometry.num_layers
    rank = np.argsort(np.argsort(selectivity, kind="stable"), kind="stable")
    most = min(drafters or -(-layers // LAYERS_PER_DRAFTER), layers - 1)

    def build(together: int) -> np.ndarray:
        """Sizes of layers that hold so many tokens together, in one head."""
        least = max(1, int(refiner_share * together / layers + 1e-6))
        result = np.zeros((geometry.schedule.num_scales, layers), np.int64)
        for s, exist in enumerate(geometry.schedule.starts):
            # as many drafters as leave the others their least; where none does, one is cut
            room = (n for n in range(most, 0, -1) if together - n * exist >= (layers - n) * least)
            cut_short = min(most, 1), min(exist, together - (layers - 1) * least)
            count, each = next(((n, exist) for n in room), cut_short)
            rest = min(exist, (together - count * each) // (layers - count))
            result[s] = np.where(rank < count, each, rest)
        return result

    low = layers
    high = together = capacities.total(geometry, budget) // geometry.num_heads
    while peak and low < high:
        middle = (low + high + 1) // 2
        fits = allocator.after_each_store(build(middle)).max() <= together
        low, high = (middle, high) if fits else (low, middle - 1)
    return build(high)

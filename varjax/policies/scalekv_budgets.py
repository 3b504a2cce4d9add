"""Sizes of layers under ScaleKV: published budget files, and budgets of our own made in
the same manner."""

import hashlib
from dataclasses import dataclass

import numpy as np

from varjax.cache import allocator
from varjax.cache.allocation import Geometry
from varjax.errors import UserError
from varjax.policies import capacities
from varjax.storage import ordinary
from varjax.storage.manifest import parse_json

LARGEST_FILE = 16 * 2**20  # bytes
LAYERS_PER_DRAFTER = 16  # the published files have 2 drafters in 32 layers and 3 in 40


@dataclass(frozen=True, eq=False)
class BudgetFile:
    """A published file: {"Scale 9": {"Block 0": 1, "Block 1": 0, ..., "Max": 920, "Min": 632,
    "Limit": 921}, ...}.

    "Scale n" is what a layer holds when our scale n - 1 starts: Max for layers marked 1 (drafters),
    Min for the others. Before the first entry nothing is dropped. Limit, if given, is what a
    drafter would hold without dropping; it tells whether the schedule is the right one.
    """

    path: str
    entries: dict[int, dict[str, int]]
    digest: str

    @classmethod
    def read(cls, path: str) -> "BudgetFile":
        try:
            data = ordinary.read(path, LARGEST_FILE)
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
        return cls(path, dict(sorted(entries.items())), hashlib.sha256(data).hexdigest())

    def tokens(self, geometry: Geometry) -> np.ndarray:
        """int [K, L]: tokens per head when each scale starts.

        Raises:
          UserError: the file is for another model.
        """
        schedule = geometry.schedule
        first, last = min(self.entries) - 1, schedule.num_scales - 1
        if sorted(self.entries) != list(range(first + 1, last + 2)) or first < 1:
            self._refuse(
                f'it has entries for "Scale n" with n = {", ".join(map(str, self.entries))}; this '
                f"model of {last + 1} scales needs consecutive ones that end at {last + 1}"
            )
        result = np.repeat(np.array(schedule.starts)[:, None], geometry.num_layers, 1)
        before = schedule.starts[first - 1]
        for s in range(first, last + 1):
            entry = self.entries[s + 1]
            limit = before + schedule.tokens[s - 1]
            result[s], before = self._layers(s + 1, entry, geometry, limit), entry["Max"]
        return result

    def _layers(self, number: int, entry: dict, geometry: Geometry, limit: int) -> np.ndarray:
        blocks = [f"Block {layer}" for layer in range(geometry.num_layers)]
        if {k for k in entry if k.startswith("Block ")} != set(blocks):
            self._refuse(f"scale {number} names other blocks than {len(blocks)} layers")
        if not 1 <= entry.get("Min", 0) <= entry.get("Max", 0):
            self._refuse(f"scale {number} needs Max and Min, with Max >= Min >= 1")
        if (given := entry.get("Limit", limit)) != limit:
            self._refuse(f"scale {number} counts on {given} tokens, this schedule has {limit}")
        return np.where([entry[block] for block in blocks], entry["Max"], entry["Min"])

    def _refuse(self, reason: str):
        raise UserError(
            f"budgets={self.path} is not for this model: {reason}; calibrate this model and "
            f"give the calibration instead"
        )


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
    rank = np.argsort(np.argsort(selectivity, kind="stable"), kind="stable")
    most = min(drafters or -(-geometry.num_layers // LAYERS_PER_DRAFTER), geometry.num_layers - 1)
    together = capacities.total(geometry, budget) // geometry.num_heads  # of one head in all layers

    def build(tokens: int) -> np.ndarray:
        return _share(geometry, tokens, rank, most, refiner_share)

    low, high = geometry.num_layers, together
    while peak and low < high:
        middle = (low + high + 1) // 2
        fits = allocator.after_each_store(build(middle)).max() <= together
        low, high = (middle, high) if fits else (low, middle - 1)
    return build(high)


def _share(
    geometry: Geometry, together: int, rank: np.ndarray, most: int, refiner_share: float
) -> np.ndarray:
    layers = geometry.num_layers
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

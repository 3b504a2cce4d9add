"""What arguments AMS-KV takes: published configurations, and everything that can be wrong."""

import re
from dataclasses import dataclass

import numpy as np

from varjax.cache.geometry import Geometry
from varjax.errors import UserError, choose
from varjax.schedule import Schedule

BY_SIMILARITY, UNIFORM = "similarity", "uniform"
GROUPS = ("condensed", "intermediate", "local")

VAR_256 = Schedule.square((1, 2, 3, 4, 5, 6, 8, 10, 13, 16))
VAR_512 = Schedule.square((1, 2, 3, 4, 6, 9, 13, 18, 24, 32))


@dataclass(frozen=True)
class Preset:
    """A published configuration: the model it is for and the arguments it stands for."""

    schedule: Schedule
    num_layers: int
    values: dict

    def check(self, name: str, geometry: Geometry) -> None:
        """Raise `UserError` if this is for a model of other shape."""
        for what, own, given in (
            ("schedule", self.schedule, geometry.schedule),
            ("number of layers", self.num_layers, geometry.num_layers),
        ):
            if own != given:
                refuse(
                    f"preset={name} is for another model: its {what} is {own}, this model has "
                    f"{given}; choose another preset, or cmin and cmax, or a budget"
                )


def _preset(layers: int, **values) -> Preset:
    return Preset({30: VAR_256, 36: VAR_512}[layers], layers, values)


_TABLE_3 = {"cmin": 41, "cmax": 430, "demanding": 8}  # {1, 2, 6} and {1, 2, 13, 16}
_STATED = {"cmin": 174, "cmax": 430, "demanding": 5}  # {1, 2, 13} and {1, 2, 13, 16}

PRESETS = {
    "d30-table3": _preset(30, **_TABLE_3),
    "d36-table3": _preset(36, cmin=581, cmax=1029, demanding=5),  # {1, 2, 24} and {1, 2, 32}
    "d30-abstract": _preset(30, cmin=41, cmax=274, demanding=8),  # {1, 2, 6} and {1, 2, 10, 13}
    "d30-stated": _preset(30, **_STATED),
    "d36-stated": _preset(36, cmin=581, cmax=1605, demanding=6),  # {1, 2, 24} and {1, 2, 24, 32}
    **{f"d30-table1-{group}": _preset(30, remove=group) for group in GROUPS},
    "d30-table2-uniform": _preset(30, placement=UNIFORM, **_STATED),
    "d30-table2-similarity": _preset(30, **_STATED),
    **{f"d30-table7-{n}": _preset(30, condensed=n, **_TABLE_3) for n in range(3)},
}


def refuse(message: str) -> None:
    raise UserError(f"policy 'amskv': {message}")


def preset_values(policy, geometry: Geometry) -> dict:
    """What the preset of a policy fills in."""
    name = policy.preset
    preset = PRESETS[choose("preset of policy 'amskv'", name, PRESETS)]
    preset.check(name, geometry)
    values, defaults = preset.values, type(policy)()
    for field in dict.fromkeys((*values, "cmin", "cmax", "remove")):
        if getattr(policy, field) != getattr(defaults, field):
            refuse(
                f"preset={name} and {field}={getattr(policy, field)} contradict each other: the "
                f"preset decides {', '.join(values)}; leave out one of the two"
            )
    online = policy.mode == "online"
    return {k: v for k, v in values.items() if not (online and k == "demanding")}


def check(policy, geometry: Geometry) -> None:
    """Raise `UserError` for arguments that are wrong in themselves or contradict each other."""
    for name, allowed in (
        ("mode", ("profiled", "online")),
        ("placement", (BY_SIMILARITY, UNIFORM)),
        ("granularity", ("token", "scale")),
        ("oversize", ("auto", "skip", "fill")),
    ):
        choose(f"{name} of policy 'amskv'", getattr(policy, name), allowed)
    if policy.remove:
        choose("group of scales to remove", policy.remove, GROUPS)
    _check_numbers(policy, geometry)
    _check_sizes(policy, geometry)
    _check_granularity(policy, geometry)
    _check_combinations(policy, geometry)


def _check_numbers(policy, geometry: Geometry) -> None:
    for name, most in (
        ("condensed", geometry.schedule.num_scales - 1),
        ("condensed_tokens", geometry.schedule.persistent_tokens),
        ("demanding", geometry.num_layers),
    ):
        value = getattr(policy, name)
        if not -1 <= value <= most:
            refuse(f"{name}={value}: choose 0 to {most}, or -1 for automatic")
    if policy.condensed >= 0 and policy.condensed_tokens >= 0:
        refuse("condensed and condensed_tokens say the same: keep one of them")
    if not -np.inf < policy.theta <= 0:
        refuse(
            f"theta={policy.theta:g}: similarities are negative distances, choose a number below 0 "
            f"(or 0 for automatic)"
        )
    if not 1 <= policy.ratio < np.inf:
        refuse(f"ratio={policy.ratio:g}: Cmax is at least Cmin, choose 1 or more")
    if policy.local < 1:
        refuse(f"local={policy.local}: choose at least 1 scale")


def _check_sizes(policy, geometry: Geometry) -> None:
    cmin, cmax = policy.cmin, policy.cmax
    if cmin == cmax == 0:
        return
    if not (cmin and cmax):
        refuse(f"cmin={cmin}, cmax={cmax}: give both, or none and a budget")
    if not 1 <= cmin <= cmax:
        refuse(f"cmin={cmin}, cmax={cmax}: needed are 1 <= cmin <= cmax")
    most = geometry.schedule.total_tokens
    if cmax > most:
        refuse(f"cmax={cmax} is more than the {most} tokens of all scales: choose at most {most}")
    locked = policy.locked_tokens(geometry, cmin)
    if locked >= cmin:
        refuse(
            f"the condensed scales take {locked} tokens, which leaves no room in cmin={cmin}: "
            f"choose a larger cmin or fewer condensed scales"
        )


def _check_granularity(policy, geometry: Geometry) -> None:
    if policy.granularity != "scale":
        return
    ends = (0, *geometry.schedule.ends)
    if policy.condensed_tokens >= 0 and policy.condensed_tokens not in ends:
        refuse(
            f"granularity=scale: condensed_tokens={policy.condensed_tokens} cuts a scale in two; "
            f"use condensed, or one of {', '.join(map(str, ends[:5]))}, ..."
        )
    if policy.oversize == "fill":
        refuse("granularity=scale keeps whole scales and oversize=fill cuts them: choose one")


def _check_combinations(policy, geometry: Geometry) -> None:
    online = policy.mode == "online"
    given = {
        "cmin and cmax": policy.cmax,
        "layers": policy.layers,
        "placement=uniform": policy.placement == UNIFORM,
        "theta": policy.theta,
        "demanding": policy.demanding >= 0,
        "mode=online": online,
        "granularity=scale": policy.granularity == "scale",
        "ratio": policy.ratio != type(policy).ratio,
        "oversize": policy.oversize != type(policy).oversize,
    }
    given = [name for name, value in given.items() if value]
    if policy.remove and given:
        refuse(f"remove={policy.remove} already says what is kept: leave out {given[0]}")
    if "ratio" in given and policy.cmax:
        refuse(
            f"ratio={policy.ratio:g} divides a budget, but cmin={policy.cmin} and "
            f"cmax={policy.cmax} are given (a preset gives them too): leave out one of the two"
        )
    if policy.local != type(policy).local and policy.remove not in GROUPS[1:]:
        refuse(
            f"local={policy.local} only says which scales remove={' or remove='.join(GROUPS[1:])} "
            f"takes: leave it out, or give one of them"
        )
    named = [name for name in ("layers", "placement=uniform") if name in given]
    if online and named:
        refuse(f"mode=online finds the layers while generating: leave out {' and '.join(named)}")
    if not online and "theta" in given:
        named += [name for name in ("theta", "demanding") if name in given]
    if len(named) > 1:
        refuse(f"{' and '.join(named)} contradict each other: keep one of them")
    if policy.layers:
        number = len(named_layers(policy.layers, geometry.num_layers))
        if policy.demanding not in (-1, number):
            refuse(f"layers={policy.layers} are {number} layers, but demanding={policy.demanding}")


def named_layers(text: str, num_layers: int) -> list[int]:
    """Read `0;3;5`, `0-7`, `all` or `none`."""
    if text in ("all", "none"):
        return list(range(num_layers)) if text == "all" else []
    found: set[int] = set()
    for part in re.split("[;,]", text):
        match = re.fullmatch(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < num_layers:
            refuse(
                f"cannot read {part!r:.40} of layers={text!r:.100}: write numbers from 0 to "
                f"{num_layers - 1}, as in 0;2;3 or 0-2, or all, or none"
            )
        found |= set(range(first, last + 1))
    return sorted(found)

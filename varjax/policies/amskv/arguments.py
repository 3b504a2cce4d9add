"""What arguments AMS-KV takes: published configurations, and everything that can be wrong."""

import re
from math import inf

from varjax.cache.geometry import Geometry
from varjax.errors import UserError, choose
from varjax.schedule import Schedule

VAR_256 = Schedule.square((1, 2, 3, 4, 5, 6, 8, 10, 13, 16))
VAR_512 = Schedule.square((1, 2, 3, 4, 6, 9, 13, 18, 24, 32))
MODELS = {"d30": (VAR_256, 30), "d36": (VAR_512, 36)}  # schedule and layers, by preset's first word
# whole scales (in braces) that give the published memory; one capacity of each pair is stated
PRESETS = {
    "d30-table3": {"cmin": 41, "cmax": 430, "demanding": 8},  # {1, 2, 6} and {1, 2, 13, 16}
    "d36-table3": {"cmin": 581, "cmax": 1029, "demanding": 5},  # {1, 2, 24} and {1, 2, 32}
    "d30-abstract": {"cmin": 41, "cmax": 274, "demanding": 8},  # {1, 2, 6} and {1, 2, 10, 13}
}


def refuse(message: str) -> None:
    raise UserError(f"policy 'amskv': {message}")


def preset_values(policy, geometry: Geometry) -> dict:
    """What the preset of a policy fills in."""
    name = policy.preset
    values = PRESETS[choose("preset of policy 'amskv'", name, PRESETS)]
    wanted, given = MODELS[name[:3]], (geometry.schedule, geometry.num_layers)
    for what, own, other in zip(("schedule", "number of layers"), wanted, given, strict=True):
        if own != other:
            refuse(
                f"preset={name} is for another model: its {what} is {own}, this model has "
                f"{other}; choose another preset, or cmin and cmax, or a budget"
            )
    for field in values:
        if getattr(policy, field) != getattr(type(policy), field):
            refuse(
                f"preset={name} and {field}={getattr(policy, field)} contradict each other: the "
                f"preset decides {', '.join(values)}; leave out one of the two"
            )
    return values if policy.mode == "profiled" else values | {"demanding": -1}


def check(policy, geometry: Geometry) -> None:
    """Raise `UserError` for arguments that are wrong in themselves or contradict each other."""
    p, schedule, layers = policy, geometry.schedule, geometry.num_layers
    choose("mode of policy 'amskv'", p.mode, ("profiled", "online"))
    choose("oversize of policy 'amskv'", p.oversize, ("auto", "skip", "fill"))
    largest = (schedule.num_scales - 1, schedule.persistent_tokens, layers)
    for name, most in zip(("condensed", "condensed_tokens", "demanding"), largest, strict=True):
        if not -1 <= getattr(p, name) <= most:
            refuse(f"{name}={getattr(p, name)}: choose 0 to {most}, or -1 for automatic")
    if p.condensed >= 0 and p.condensed_tokens >= 0:
        refuse("condensed and condensed_tokens say the same: keep one of them")
    if not -inf < p.theta <= 0:
        refuse(
            f"theta={p.theta:g}: similarities are negative distances, choose a number below 0 "
            f"(or 0 for automatic)"
        )
    if not 1 <= p.ratio < inf:
        refuse(f"ratio={p.ratio:g}: Cmax is at least Cmin, choose 1 or more")
    if p.cmin or p.cmax:
        _check_sizes(p, geometry)
    if p.mode == "online" and p.layers:
        refuse("mode=online finds the layers while generating: leave out layers")
    named = [name for name in ("layers", "theta") if getattr(p, name)]
    named += ["demanding"] * (p.demanding >= 0 and p.theta != 0)
    if len(named) > 1 and p.mode == "profiled":
        refuse(f"{' and '.join(named)} contradict each other: keep one of them")
    number = len(named_layers(p.layers, layers)) if p.layers else p.demanding
    if p.demanding not in (-1, number):
        refuse(f"layers={p.layers} are {number} layers, but demanding={p.demanding}")


def _check_sizes(p, geometry: Geometry) -> None:
    sizes, most = f"cmin={p.cmin}, cmax={p.cmax}", geometry.schedule.total_tokens
    if not (p.cmin and p.cmax):
        refuse(f"{sizes}: give both, or none and a budget")
    if not 1 <= p.cmin <= p.cmax:
        refuse(f"{sizes}: needed are 1 <= cmin <= cmax")
    if p.cmax > most:
        refuse(f"cmax={p.cmax} is more than the {most} tokens of all scales: choose at most {most}")
    if (locked := p.locked_tokens(geometry, p.cmin)) >= p.cmin:
        refuse(
            f"the condensed scales take {locked} tokens, which leaves no room in cmin={p.cmin}: "
            f"choose a larger cmin or fewer condensed scales"
        )
    if p.ratio != type(p).ratio:
        refuse(
            f"ratio={p.ratio:g} divides a budget, but cmin={p.cmin} and cmax={p.cmax} are given "
            f"(a preset gives them too): leave out one of the two"
        )


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

"""What arguments AMS-KV takes: published configurations, and everything that can be wrong."""

import re
from collections.abc import Iterator
from math import inf

from varjax.cache.geometry import Geometry
from varjax.errors import choose
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


def preset_values(policy, geometry: Geometry) -> dict:
    """What the preset of a policy fills in."""
    name = policy.preset
    values = PRESETS[choose("preset of policy 'amskv'", name, PRESETS)]
    wanted, given = MODELS[name[:3]], (geometry.schedule, geometry.num_layers)
    for what, own, other in zip(("schedule", "number of layers"), wanted, given, strict=True):
        if own != other:
            policy.refuse(
                f"preset={name} is for another model: its {what} is {own}, this model has "
                f"{other}; choose another preset, or cmin and cmax, or a budget"
            )
    for field in values:
        if getattr(policy, field) != getattr(type(policy), field):
            policy.refuse(
                f"preset={name} and {field}={getattr(policy, field)} contradict each other: the "
                f"preset decides {', '.join(values)}; leave out one of the two"
            )
    return values if policy.mode == "profiled" else values | {"demanding": -1}


def check(policy, geometry: Geometry) -> None:
    """Raise `UserError` for arguments that are wrong in themselves or contradict each other."""
    choose("mode of policy 'amskv'", policy.mode, ("profiled", "online"))
    choose("oversize of policy 'amskv'", policy.oversize, ("auto", "skip", "fill"))
    for fits, reason in _rules(policy, geometry):
        if not fits:
            policy.refuse(reason)


def _rules(p, geometry: Geometry) -> Iterator[tuple[bool, str]]:
    """Every rule, and what to say if it is broken; later ones rely on earlier ones."""
    schedule, layers, total = geometry.schedule, geometry.num_layers, geometry.schedule.total_tokens
    largest = (schedule.num_scales - 1, schedule.persistent_tokens, layers)
    for name, most in zip(("condensed", "condensed_tokens", "demanding"), largest, strict=True):
        value = getattr(p, name)
        yield -1 <= value <= most, f"{name}={value}: choose 0 to {most}, or -1 for automatic"
    both = p.condensed >= 0 and p.condensed_tokens >= 0
    yield not both, "condensed and condensed_tokens say the same: keep one of them"
    negative = "similarities are negative distances, choose a number below 0 (or 0 for automatic)"
    yield -inf < p.theta <= 0, f"theta={p.theta:g}: {negative}"
    yield 1 <= p.ratio < inf, f"ratio={p.ratio:g}: Cmax is at least Cmin, choose 1 or more"
    if p.cmin or p.cmax:
        sizes = f"cmin={p.cmin}, cmax={p.cmax}"
        yield p.cmin and p.cmax, f"{sizes}: give both, or none and a budget"
        yield 1 <= p.cmin <= p.cmax, f"{sizes}: needed are 1 <= cmin <= cmax"
        most = f"the {total} tokens of all scales: choose at most {total}"
        yield p.cmax <= total, f"cmax={p.cmax} is more than {most}"
        locked = p.locked_tokens(geometry, p.cmin)
        yield (
            locked < p.cmin,
            f"the condensed scales take {locked} tokens, which leaves no room in cmin={p.cmin}: "
            f"choose a larger cmin or fewer condensed scales",
        )
        yield (
            p.ratio == type(p).ratio,
            f"ratio={p.ratio:g} divides a budget, but cmin={p.cmin} and cmax={p.cmax} are given "
            f"(a preset gives them too): leave out one of the two",
        )
    online = p.mode == "online"
    found = "mode=online finds the layers while generating: leave out layers"
    yield not (online and p.layers), found
    named = [name for name in ("layers", "theta") if getattr(p, name)]
    named += ["demanding"] * (p.demanding >= 0 and p.theta != 0)
    contradiction = f"{' and '.join(named)} contradict each other: keep one of them"
    yield online or len(named) < 2, contradiction
    number = len(named_layers(p, layers)) if p.layers else p.demanding
    differ = f"layers={p.layers} are {number} layers, but demanding={p.demanding}"
    yield p.demanding in (-1, number), differ


def named_layers(policy, num_layers: int) -> list[int]:
    """The layers of `0;3;5`, `0-7`, `all` or `none`."""
    text = {"all": f"0-{num_layers - 1}"}.get(policy.layers, policy.layers)
    found: set[int] = set()
    for part in re.split("[;,]", text) if text != "none" else ():
        match = re.fullmatch(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < num_layers:
            policy.refuse(
                f"cannot read {part!r:.40} of layers={text!r:.100}: write numbers from 0 to "
                f"{num_layers - 1}, as in 0;2;3 or 0-2, or all, or none"
            )
        found |= set(range(first, last + 1))
    return sorted(found)

"""Configurations in the argument names of published constructors: read, checked, written."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import ClassVar, Self

from varjax.core.errors import UserError, nearest, show
from varjax.core.sampling import Sampling
from varjax.core.sequence import Schedule

# Generous limits: what is beyond them is a mistake, refused before anything of that size is made.
LARGEST_DEPTH = 1024  # layers of a transformer
LARGEST_SIZE = 10**7  # widths, classes, codes
INTEGERS = tuple[int, ...]


class Configuration:
    """Base of all configurations, which are frozen dataclasses. A field `schedule` is called
    `patch_nums` in published files.

    what: the model's name in messages.
    ignored: names in published files that change no function computed.
    fixed: options in them with the one value that all released models have.
    """

    what: ClassVar[str]
    ignored: ClassVar[Collection[str]] = ()
    fixed: ClassVar[Mapping[str, object]] = {}

    @classmethod
    def wrong(cls, problem: str) -> UserError:
        return UserError(f"{cls.what} configuration: {problem}")

    @classmethod
    def arguments(cls, given: Mapping, **others: type) -> dict:
        """The entries of `given` that are arguments, checked and converted to the types of the
        fields: bool, int, float, tuple[int, ...] or object, which takes anything.

        Args:
          given: {argument name: JSON value}.
          others: types of further names, and of fields that published files write differently.

        `UserError` for an unknown name, a value of another type, or another one of `fixed`.
        """
        types = {f.name: f.type for f in dataclasses.fields(cls)} | others
        types = {name: kind for name, kind in types.items() if kind is not Schedule}
        found = {}
        for name, value in given.items():
            if name in types:
                found[name] = cls._typed(name, value, types[name])
            elif name in cls.fixed:
                if value != cls.fixed[name]:
                    only = f"released models have {cls.fixed[name]}"
                    raise cls.wrong(f"{name}={value!r:.40} is not supported: {only}")
            elif name not in cls.ignored:
                known = ", ".join(sorted(types))
                raise cls.wrong(f"unknown name {name!r}: known are {known}{nearest(name, types)}")
        return found

    @classmethod
    def inside(cls, given: Mapping, name: str) -> Mapping:
        """The names and values that a configuration has under a name; none where it lacks it.
        `UserError` for anything else."""
        found = given.get(name, {})
        if not isinstance(found, Mapping):
            raise cls.wrong(f"{name} is {show(found)}, it must hold names and values")
        return found

    @classmethod
    def from_published(cls, given: Mapping) -> Self:
        """The configuration with these arguments. `UserError` if one is unknown, of another type or
        missing."""
        found, fields = cls.arguments(given), dataclasses.fields(cls)
        for field in fields:
            if field.name not in found and field.default is dataclasses.MISSING:
                raise cls.wrong(f"{field.name} is missing")
        return cls(**found)

    @classmethod
    def _typed(cls, name: str, value, kind: type):
        if kind is object:
            return value
        is_integer, is_float = type(value) is int, isinstance(value, float)
        are_integers = isinstance(value, (list, tuple)) and all(type(n) is int for n in value)
        fits, convert, words = {
            bool: (isinstance(value, bool), bool, "be true or false"),
            int: (is_integer or (is_float and value.is_integer()), int, "be a whole number"),
            float: (is_float or (is_integer and abs(value) < 1e300), float, "be a number"),
            INTEGERS: (are_integers, tuple, "list whole numbers, as [1, 2, 4, 4]"),
        }[kind]
        if not fits:
            raise cls.wrong(f"{name} is {value!r:.60}, it must {words}")
        return convert(value)

    @classmethod
    def read_schedule(cls, patch_nums) -> Schedule:
        """Schedule from `patch_nums`: sides of square maps, or (height, width) pairs."""
        try:
            pairs = [(n, n) if type(n) is int else tuple(n) for n in patch_nums]
            if any([type(n) for n in pair] != [int, int] for pair in pairs):  # true is no side
                raise TypeError
        except TypeError as error:
            raise cls.wrong(
                f"patch_nums {patch_nums!r:.80} must list sides or [height, width] pairs, for"
                " example [1, 2, 4]"
            ) from error
        return Schedule(tuple(pairs))

    def to_published(self) -> dict:
        """The published constructor's names and JSON values: the inverse of `from_published`."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if "schedule" in values:
            maps = values.pop("schedule").maps  # sides where the map is square
            values["patch_nums"] = [h if h == w else [h, w] for h, w in maps]
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def check_numbers(self, *positive: str, **limits: tuple[float, float]) -> None:
        """Raises `UserError` unless the fields that are numbers lie within `limits` (least, most).
        Without any these are 1 and `LARGEST_SIZE` for whole numbers, 0 and infinity for real ones,
        which must be finite. positive: real ones that must not be 0 either."""
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if field.type is int:
                self.check_size(name, value, *limits.get(name, (1, LARGEST_SIZE)))
            elif field.type is float:
                least, most = limits.get(name, (0, math.inf))
                fits = math.isfinite(value) and least <= value <= most
                if not fits or (name in positive and value == 0):
                    allowed = "greater than 0" if name in positive else f"at least {least}"
                    raise self.wrong(
                        f"{name} is {value!r:.60}, it must be a finite number, {allowed}"
                    )

    def check_size(self, name: str, value: int, least: int = 1, most: int = LARGEST_SIZE) -> None:
        """Raises `UserError` unless `least` <= value <= `most`, for a value that follows from
        fields."""
        if not least <= value <= most:
            limit = f"at least {least}" if value < least else f"at most {most}"
            raise self.wrong(f"{name} is {value!r:.60}, it must be {limit}")

    def check_multiple(self, name: str, value: int, of: int, words: str = "") -> None:
        """Raises `UserError` unless a value is a multiple of another, called `words`."""
        if value % of:
            raise self.wrong(f"{name} {value} is not a multiple of {words}{of}")


class TransformerConfig(Configuration):
    """Base of the configurations of transformers. All have `is_guided(sampling)`, whether there are
    unconditional rows, and `check_sampling(sampling)`, which returns it, or raises `UserError` if
    the model cannot draw that way.

    condition: name of the kind of condition that images are made of (`Family.conditions`).
    num_classes: classes that images may be made of; 0: the model draws from something else.
    queries_per_head: query heads that share each of the `num_heads` heads of keys and values.
    """

    condition: str
    num_classes = 0
    queries_per_head = 1

    # heights and widths of the maps of tokens that are drawn, one after the other
    token_maps = property(attrgetter("schedule.maps"))

    @property
    def total_tokens(self) -> int:
        """L: tokens that are drawn, of all maps together."""
        return sum(h * w for h, w in self.token_maps)

    def check_mixing(self, sampling: Sampling) -> None:
        """Raises `UserError` unless rows are mixed on the logits only."""
        if sampling.cfg_insertion_layer != (0,):
            raise UserError(
                f"cfg_insertion_layer={show(sampling.cfg_insertion_layer)}: {self.what} mixes its"
                " rows on the logits only, which is 0"
            )

    def with_template(
        self, aspect: float | str | None, size: str | None, cell: int = 16
    ) -> "TransformerConfig":
        """The configuration under which the same weights draw pictures of another aspect
        (height / width) and size; None keeps the present one. cell: pixels of a side of a latent
        cell, by the model's codec. `UserError` if the model has one schedule per checkpoint, or
        there is no such template."""
        if aspect is None and size is None:
            return self
        raise UserError(
            f"aspect and size: {self.what} draws pictures of one shape per checkpoint: leave them "
            "out"
        )

    def with_grid(self, grid: tuple[int, int]) -> "TransformerConfig":
        """The configuration under which the same weights draw pictures of another grid (height,
        width), in the units that the model counts in. `UserError` if the model has none."""
        raise UserError(
            f"grid={'x'.join(map(str, grid))}: the grid of {self.what} is part of its schedule: "
            f"leave it out"
        )

    def with_prompt_tokens(self, count: int) -> "TransformerConfig":
        """The configuration under which the same weights have so many places for the token ids of
        a prompt. `UserError` if the model takes none."""
        raise UserError(f"prompt_tokens={count}: {self.what} takes no token ids, leave it out")

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

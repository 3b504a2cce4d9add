"""The flags of one command, and error messages about them in our words.

A command has single flags, and groups of settings that one flag takes together, as
`--sampling=tau=0.5,greedy=true`. The flags are read once, then the groups, then what may add
allowed values (`CommandFlags.used`).
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

from absl import flags

from experiments.cli.reading import check_arguments, list_hint, not_valid, parse_flags
from varjax.core import errors
from varjax.core.errors import UserError, nearest
from varjax.storage.values import parse_pairs

# {flag that is gone: what to use instead}, of all commands
GONE = {
    "adopt": "tiles are kept by bench --tune, times by --draw=TASK --json=FILE",
    "compilation_cache": "set JAX_COMPILATION_CACHE_DIR=DIR, or JAX_ENABLE_COMPILATION_CACHE=false "
    "for none",
    "connections": "a server takes 1024, and fewer where `ulimit -n` is lower",
    "docs": "a server has /docs and /openapi.json; a proxy may hide them",
    "drain_seconds": "a server draws for at most 60 seconds after SIGTERM",
    "filling": "bench --check fills tables in every way that matters",
    "images_per_class": "use --num_images=N/class",
    "images_per_prompt": "use --num_images=N/prompt",
    "machine": "use bench --check, --tune or --draw=all, one after the other (make chip)",
    "max_length": "use --prompt_tokens=N",
    "metric_module": "use --plugin=FILE.py",
    "model_module": "use --plugin=FILE.py",
    "negative_prompt": "use --negative_prompts=TEXT",
    "page": "a server has its page at /; a proxy may hide it",
    "policy_module": "use --plugin=FILE.py",
    "prompt": "use --prompts=TEXT",
    "prompt_set": "write the kind before the file, as --prompts=coco-captions:FILE",
    "quick": "use bench --draw=all --minutes=5",
    "request_seconds": "a server answers within 600 seconds",
    "skip": "name the tasks that are to run, as bench --draw=TASK,TASK",
    "step": "name the tasks that are to run, as bench --draw=TASK,TASK",
    "temporaries": "aot lists the eight largest of each program",
    "text_tokens": "use --prompt_tokens=N",
    "worker": "bench is one process; make chip ends it after MINUTES",
}


class _Choice(flags.ArgumentParser):
    """Any text; `CommandFlags.parse` checks it against the values that there are by then."""

    def __init__(self, values: Collection[str]):
        super().__init__()
        self.enum_values = values


class Settings:
    """absl flags by themselves. Most methods define one and return its holder."""

    def __init__(self):
        self.values = flags.FlagValues()
        self.string = partial(flags.DEFINE_string, flag_values=self.values)
        self.integer = partial(flags.DEFINE_integer, flag_values=self.values)
        self.floating = partial(flags.DEFINE_float, flag_values=self.values)
        self.boolean = partial(flags.DEFINE_boolean, flag_values=self.values)
        self.enum = partial(flags.DEFINE_enum, flag_values=self.values)
        self.list = partial(flags.DEFINE_list, flag_values=self.values)
        self.texts = partial(flags.DEFINE_multi_string, flag_values=self.values)  # repeated


class Group(Settings):
    """Settings that the flag --NAME takes together. alone: flags that give one by itself, as
    scripts may do: KEY or NAME_KEY."""

    def __init__(self, name: str, alone: Collection[str]):
        super().__init__()
        self.name, self.alone = name, {flag: flag.removeprefix(f"{name}_") for flag in alone}

    def parse(self, texts: Sequence[str], alone: Sequence[str]) -> None:
        """Set what the texts of the flag say, and what was given by flags of its own, `alone`."""
        given, keys = list(alone), {text.removeprefix("--").partition("=")[0] for text in alone}
        for text in texts:
            if not text:
                raise UserError(f"--{self.name}= is empty: give key=value, or leave the flag out")
            with errors.about(f"--{self.name}={text}"):
                pairs = parse_pairs(text)
                for key in filter(keys.__contains__, pairs):
                    raise UserError(f"{key} is given twice: keep one of them")
            given += [f"--{key}={value}" for key, value in pairs.items()]
            keys |= pairs.keys()
        parse_flags(["", *given], self.values, self.written, self._unknown)

    def written(self, key: str) -> str:
        """A setting as it is given on the command line, without its value."""
        flags = [flag for flag, name in self.alone.items() if name == key]
        return f"--{flags[0]}" if flags else f"--{self.name}={key}"

    def _unknown(self, name: str) -> str:
        close = nearest(name, list(self.values))
        return f"--{self.name} has no {name}{close}, it takes {', '.join(self.values)}"


class CommandFlags(Settings):
    """The flags of a command.

    example: for the help, arguments of a call that runs; lines before it may be whole commands,
      which make what it reads.
    essential: names of the flags that most people need, which the help shows first.
    compiles: whether programs are compiled, which JAX then keeps for the next start.
    """

    def __init__(self, example: str = "", essential: str = "", *, compiles: bool = False):
        super().__init__()
        self.example, self.essential, self.compiles = example, essential.split(), compiles
        self.groups: dict[str, Group] = {}
        self.argument_name: str | None = None
        # each with the flags before it
        self.headings: list[tuple[str, set[str]]] = []
        self._uses: dict[str, Callable[[str], object]] = {}
        self._choices: dict[str, Collection[str]] = {}

    def argument(self, name: str, help: str) -> flags.FlagHolder[str]:
        """Define a required text that is given without the name of its flag, or with it."""
        self.argument_name = name
        return self.string(name, None, help, required=True)

    def group(self, name: str, help: str, alone: Collection[str] = ()) -> Group:
        """Define a flag that takes the settings of the group returned. alone: as of `Group`."""
        self.texts(name, [], help)
        self.groups[name] = Group(name, alone)
        return self.groups[name]

    def choice(self, name: str, default: str, values: Collection[str], help: str):
        """Define an enumeration to which `used` may add values."""
        self._choices[name] = values
        return self.define(_Choice(values), name, default, help)

    def define(self, parser: flags.ArgumentParser, name: str, default: object, help: str):
        """Define a flag with a parser of one's own."""
        flag = flags.Flag(parser, flags.ArgumentSerializer(), name, default, help)
        return flags.DEFINE_flag(flag, flag_values=self.values)

    def used(self, name: str, help: str, use: Callable[[str], object]) -> None:
        """Define a text that `use` gets as soon as all flags are read. It may set defaults of other
        flags, or add to the values of a `choice`."""
        self.string(name, None, help)
        self._uses[name] = use

    def heading(self, title: str) -> None:
        """Put the flags that follow below a heading of the help."""
        self.headings.append((title, set(self.values)))

    def all_values(self) -> list[flags.FlagValues]:
        """The flags, and the settings of every group."""
        return [self.values, *(group.values for group in self.groups.values())]

    def flag(self, name: str) -> flags.Flag:
        """The flag, or the setting of a group, of this name."""
        for group in self.groups.values():
            name = group.alone.get(name, name)
        return next(values[name] for values in self.all_values() if name in values)

    def names(self) -> list[str]:
        """All that may be given by itself: flags, and the settings that are also flags."""
        return [*self.values, *itertools.chain(*(group.alone for group in self.groups.values()))]

    def parse(self, argv: Sequence[str]) -> None:
        """Set everything from the arguments (program name first). `UserError` if a flag is unknown,
        gone, malformed or missing, or there is a surplus argument."""
        argv = list(argv)
        bare = [i for i, text in enumerate(argv) if i and not text.startswith("-")]
        name = self.argument_name
        if name and len(bare) == 1 and argv[bare[0] - 1] != f"--{name}":
            argv[bare[0]] = f"--{name}={argv[bare[0]]}"
        takes_value = {name for name in self.names() if not self.flag(name).boolean}
        check_arguments(argv, takes_value)
        rest, alone = [], {name: [] for name in self.groups}
        for text, group in self._sorted(argv):
            (rest if group is None else alone[group]).append(text)
        parse_flags(rest, self.values, unknown=self._unknown)
        for name, group in self.groups.items():
            group.parse(self.values[name].value, alone[name])
        for name, use in self._uses.items():
            if self.values[name].value:
                use(self.values[name].value)
        for name, values in self._choices.items():
            if (given := self.values[name].value) not in values:
                raise UserError(not_valid(self.values[name], given, f"--{name}"))

    def _sorted(self, argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
        """Yield every argument with the group that it belongs to, None for most; a setting that is
        given as a flag as --KEY=VALUE."""
        groups = {name: group for group in self.groups.values() for name in group.alone}
        arguments = iter(argv)
        for text in arguments:
            given, equals, value = text.removeprefix("--").partition("=")
            name = given if given in groups else given.removeprefix("no")
            if not text.startswith("--") or name not in groups:
                yield text, None
                continue
            key = groups[name].alone[name]
            if not equals:
                is_flag = groups[name].values[key].boolean
                value = str(name == given).lower() if is_flag else next(arguments, "")
            yield f"--{key}={value}", groups[name].name

    def _unknown(self, name: str) -> str:
        """Message about a flag that does not exist, or does not exist any more."""
        for gone in (name, name.removeprefix("no")):
            if gone in GONE:
                return f"--{gone} is gone: {GONE[gone]}"
        for group in self.groups.values():
            if name in group.values:
                return f"there is no flag --{name}: use --{group.name}={name}=VALUE"
        close = nearest(f"--{name}", [f"--{one}" for one in self.names()])
        return f"unknown flag --{name}{close}{list_hint()}"


def about(holder: flags.FlagHolder | flags.Flag) -> AbstractContextManager[None]:
    """Put the flag and its value before the message of a `UserError` inside (`errors.about`)."""
    return errors.about(f"--{holder.name}={holder.value}")

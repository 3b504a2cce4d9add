"""The flags of one command, and error messages about them in our words.

A command may have groups of flags that one flag gives together, as
`--sampling=tau=0.5,greedy=true`. The flags are read first, then the groups, then what may add
allowed values (`CommandFlags.used`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

from absl import flags

from varjax import errors
from varjax.cli.reading import check_arguments, list_hint, not_valid, parse_flags
from varjax.errors import UserError, nearest
from varjax.key_values import parse_pairs

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
}


class _Choice(flags.ArgumentParser):
    """Any text; `CommandFlags.parse` checks it against the values that there are by then."""

    def __init__(self, values: Collection[str]):
        super().__init__()
        self.enum_values = values


class CommandFlags:
    """The flags of a command. Most methods define one and return its holder, whose `value` is read
    later.

    example: for the help, arguments of a call that runs; lines before it may be whole commands,
      which make what it reads.
    essential: names of the flags that most people need, which the help shows first.
    compiles: whether programs are compiled, which JAX then keeps for the next start.
    groups: {flag that gives several: {their keys: flags}}.
    """

    def __init__(self, example: str = "", essential: str = "", *, compiles: bool = False):
        self.example, self.essential, self.compiles = example, essential.split(), compiles
        self.values = flags.FlagValues()
        self.string = partial(flags.DEFINE_string, flag_values=self.values)
        self.integer = partial(flags.DEFINE_integer, flag_values=self.values)
        self.floating = partial(flags.DEFINE_float, flag_values=self.values)
        self.boolean = partial(flags.DEFINE_boolean, flag_values=self.values)
        self.enum = partial(flags.DEFINE_enum, flag_values=self.values)
        self.list = partial(flags.DEFINE_list, flag_values=self.values)
        self.texts = partial(flags.DEFINE_multi_string, flag_values=self.values)  # repeated
        self.require = partial(flags.mark_flag_as_required, flag_values=self.values)
        self.groups: dict[str, dict[str, str]] = {}
        self.argument_name: str | None = None
        self.headings: dict[str, set[str]] = {}  # flags that were there before each
        self._uses: dict[str, Callable[[str], object]] = {}
        self._choices: dict[str, Collection[str]] = {}

    def argument(self, name: str, help: str) -> flags.FlagHolder[str]:
        """Define a required text that is given without the name of its flag, or with it."""
        self.argument_name = name
        return self.string(name, None, help, required=True)

    def group(self, name: str, help: str, settings: Iterable[str]) -> None:
        """Define a flag that gives several: --NAME=KEY=VALUE,KEY=VALUE. settings: these flags, KEY
        or NAME_KEY each; the help shows them below it."""
        self.texts(name, [], help)
        self.groups[name] = {flag.removeprefix(f"{name}_"): flag for flag in settings}

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
        self.headings[title] = set(self.values)

    def parse(self, argv: Sequence[str]) -> None:
        """Set everything from the arguments (program name first).

        Raises:
          UserError: a flag is unknown, gone, malformed or missing, or there is a surplus argument.
        """
        argv = list(argv)
        bare = [i for i, text in enumerate(argv) if i and not text.startswith("-")]
        name = self.argument_name
        if name and len(bare) == 1 and argv[bare[0] - 1] != f"--{name}":
            argv[bare[0]] = f"--{name}={argv[bare[0]]}"
        check_arguments(argv, {name for name in self.values if not self.values[name].boolean})
        parse_flags(argv, self.values, self._unknown)
        parse_flags([argv[0], *self._grouped()], self.values)
        for name, use in self._uses.items():
            if self.values[name].value:
                use(self.values[name].value)
        for name, values in self._choices.items():
            if (given := self.values[name].value) not in values:
                raise UserError(not_valid(self.values[name], given))

    def _grouped(self) -> Iterator[str]:
        """Yield the flags that groups give, as arguments."""
        for name, settings in self.groups.items():
            for text in self.values[name].value:
                if not text:
                    raise UserError(f"--{name}= is empty: give key=value, or leave the flag out")
                with errors.about(f"--{name}={text}"):
                    given = parse_pairs(text)
                for key, value in given.items():
                    if key not in settings:
                        close, known = nearest(key, list(settings)), ", ".join(settings)
                        raise UserError(f"--{name} has no {key}{close}, it takes {known}")
                    yield f"--{settings[key]}={value}"

    def _unknown(self, name: str) -> str:
        """What to say of a flag that does not exist, or not any more."""
        for gone in (name, name.removeprefix("no")):
            if gone in GONE:
                return f"--{gone} is gone: {GONE[gone]}"
        close = nearest(f"--{name}", [f"--{one}" for one in self.values])
        return f"unknown flag --{name}{close}{list_hint()}"


def about(holder: flags.FlagHolder | flags.Flag) -> AbstractContextManager[None]:
    """Put the flag and its value before the message of a `UserError` inside (`errors.about`)."""
    return errors.about(f"--{holder.name}={holder.value}")

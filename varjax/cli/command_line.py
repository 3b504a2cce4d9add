"""Running a command: its flags, help, and exit statuses.

A command is a module whose docstring is its manual. It has flags of its own, so that one process
may import several commands. It ends with the call:

    FLAGS = CommandFlags()
    SEED = FLAGS.integer("seed", 0, "What the random numbers start from.")

    if __name__ == "__main__":
        command_line.run(main)

where `main(argv)` returns None or an exit status. Every command has --help and --version.
Statuses: 0 done, 1 a bug (traceback) or a lost process (one message), 2 wrong input or a file that
cannot be read or written (one message, no traceback), 130 interrupted.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias

from absl import flags
from absl.testing import flagsaver

from varjax import jax_settings
from varjax.cli import devices, streams, version
from varjax.cli.flags import (
    HELP,
    VERSION,
    CommandFlags,
    check_arguments,
    is_asked_for,
    parse_flags,
)
from varjax.cli.help import help_text
from varjax.errors import UserError
from varjax.parallel import processes
from varjax.parallel.processes import AgreedError, LostProcess

Main: TypeAlias = Callable[[Sequence[str]], int | None]


def run(main: Main, argv: Sequence[str] | None = None) -> NoReturn:
    """Parse `argv` (default: the process's), call `main([program])` and exit with its status.

    The flags are `FLAGS` in the module of `main` (`CommandFlags`), or absl's global ones. Their
    values are restored at the end, so a test may run several commands in one process.
    """
    argv = list(sys.argv if argv is None else argv)
    streams.keep()
    own = getattr(sys.modules[main.__module__], "FLAGS", None)
    own = own if isinstance(own, CommandFlags) else None
    values = flags.FLAGS if own is None else own.values
    saved = flagsaver.save_flag_values(values)
    try:
        status = _guarded(main, argv, own, values)
    except Exception as error:
        if why := devices.why_none(error):
            status = _complain(why, 2)
        elif processes.count() == 1:
            raise
        else:
            traceback.print_exc()
            status = 1
    finally:
        flagsaver.restore_flag_values(saved, values)
    processes.leave(status)
    sys.exit(status)


def _guarded(
    main: Main, argv: list[str], own: CommandFlags | None, values: flags.FlagValues
) -> int:
    """Return the exit status of one run. Expected failures become a message on standard error."""
    try:
        if is_asked_for(VERSION, argv):
            print(version.text())
            return 0
        argv = own.named(argv) if own is not None else argv
        help_wanted = is_asked_for(HELP, argv)
        if not help_wanted:
            check_arguments(argv, values)
        if own is not None:
            own.use_first(argv)
        if help_wanted:
            print(help_text(main, values, own))
            return 0
        parse_flags(argv, values)
        if own is not None:
            own.use_compilation_cache()
        with jax_settings.pinned():
            status = main(argv[:1])
        sys.stdout.flush()
        return status or 0
    except AgreedError as error:  # all processes end, so that none has to notice
        sys.exit(_complain(str(error), 2))
    except UserError as error:
        return _complain(str(error), 2)
    except LostProcess as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except OSError as error:
        return _complain(_describe_os_error(error), 2)


def _complain(message: str, status: int) -> int:
    """Print a message on standard error and return the status."""
    print(f"error: {streams.shown(message)}", file=sys.stderr, flush=True)
    return status


def _describe_os_error(error: OSError) -> str:
    """Describe a failed read or write in one line, with the reason and the file where known."""
    reason = error.strerror or str(error) or type(error).__name__
    paths = [str(path) for path in (error.filename, error.filename2) if path is not None]
    return f"{reason}: {' -> '.join(paths)}" if paths else reason

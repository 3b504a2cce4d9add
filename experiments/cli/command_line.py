"""Running a command: its flags, help, and exit statuses.

A command is a module whose docstring is its manual. It has flags of its own, so that one process
may import several commands. It ends with the call:

    FLAGS = CommandFlags()
    SEED = FLAGS.integer("seed", 0, "What the random numbers start from.")

    if __name__ == "__main__":
        command_line.run(main)

where `main(argv)` returns None or an exit status. Every command has --help and --version.
Statuses: 0 done, or ended by SIGTERM, 1 a bug (traceback) or a lost process (one message), 2 wrong
input or a file that cannot be read or written (one message, no traceback), 130 interrupted.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias

import jax
from absl.testing import flagsaver

from experiments import processes
from experiments.cli import streams
from experiments.cli.flags import CommandFlags
from experiments.cli.help import help_text, version_text
from experiments.cli.reading import HELP, VERSION, is_asked_for
from varjax import jax_settings
from varjax.core.errors import UserError
from varjax.generation import compilation_cache, hosts

Main: TypeAlias = Callable[[Sequence[str]], int | None]


def run(main: Main, argv: Sequence[str] | None = None) -> NoReturn:
    """Parse `argv` (default: the process's), call `main([program])` and exit with its status.

    The flags are `FLAGS` in the module of `main`, if it has any. Their values are restored at the
    end, so a test may run several commands in one process.
    """
    argv = list(sys.argv if argv is None else argv)
    streams.keep()
    own = getattr(sys.modules[main.__module__], "FLAGS", CommandFlags())
    saved = [(values, flagsaver.save_flag_values(values)) for values in own.all_values()]
    try:
        status = _guarded(main, argv, own)
    except Exception as error:
        if _has_no_device(error):
            told = jax.config.jax_platforms
            said = "one of these platforms is not installed or has no device: unset it"
            status = _complain(f"JAX_PLATFORMS={told}: {said}, or install varjax[gpu]", 2)
        elif hosts.count() == 1:
            raise
        else:
            traceback.print_exc()
            status = 1
    finally:
        for values, before in saved:
            flagsaver.restore_flag_values(before, values)
    processes.leave(status)
    sys.exit(status)


def _guarded(main: Main, argv: list[str], own: CommandFlags) -> int:
    """Return the exit status of one run. Expected failures become a message on standard error."""
    try:
        if is_asked_for(VERSION, argv):
            print(version_text())
            return 0
        if is_asked_for(HELP, argv):
            print(help_text(main, own))
            return 0
        own.parse(argv)
        if own.compiles:
            compilation_cache.use()
        with jax_settings.pinned():
            status = main(argv[:1])
        sys.stdout.flush()
        return status or 0
    except processes.Stopped as stopped:
        if hosts.is_first():
            print(f"ended by SIGTERM: {stopped}", file=sys.stderr, flush=True)
        return 0
    except processes.AgreedError as error:  # all processes end, so that none has to notice
        sys.exit(_complain(str(error), 2))
    except UserError as error:
        return _complain(str(error), 2)
    except hosts.LostProcess as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        paths = [str(path) for path in (error.filename, error.filename2) if path is not None]
        return _complain(f"{reason}: {' -> '.join(paths)}" if paths else reason, 2)


def _has_no_device(error: Exception) -> bool:
    """Whether an error says that there is no device of the platforms that JAX was told to use."""
    if not jax.config.jax_platforms or "initialize backend" in str(error):
        return bool(jax.config.jax_platforms)
    try:
        jax.devices()
        return False
    except Exception:  # each plugin fails in its own way
        return True


def _complain(message: str, status: int) -> int:
    """Print a message on standard error and return the status."""
    print(f"error: {streams.shown(message)}", file=sys.stderr, flush=True)
    return status

"""The standard streams of a command, which end no work: their reader may have gone, as in
`... | head -1`, or they were never open."""

import io
import os
import sys


def keep() -> None:
    """Open streams that are closed, as the empty file, before another file takes their numbers; let
    writing into a pipe that nobody reads do nothing."""
    for number, mode in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            _to_nothing(number, mode)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _text(number))
        elif stream is getattr(sys, f"__{name}__") and _number(stream) == number:
            stream.flush()
            setattr(sys, name, _text(number, stream))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


class _Unread(io.FileIO):
    """A file number whose reader may go away."""

    def write(self, data) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            _to_nothing(self.fileno(), os.O_WRONLY)
            return len(data)


def _text(number: int, like: io.TextIOWrapper | None = None) -> io.TextIOWrapper:
    """Return the text stream of a number, in which every name of a file can be printed."""
    return io.TextIOWrapper(
        io.BufferedWriter(_Unread(number, "w", closefd=False)),
        like.encoding if like else "utf-8",
        "backslashreplace",
        line_buffering=number == 2 or bool(like and like.line_buffering),
        write_through=bool(like and like.write_through),
    )


def _number(stream: io.TextIOWrapper) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _to_nothing(number: int, mode: int) -> None:
    opened = os.open(os.devnull, mode)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)

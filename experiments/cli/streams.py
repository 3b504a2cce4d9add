"""The standard streams of a command, which end no work: their reader may have gone, as in
`... | head -1`, or they were never open."""

import io
import os
import re
import sys

# of ASCII and Latin-1, but for tabs and ends of lines; those that turn the direction of writing
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


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
        elif stream is getattr(sys, f"__{name}__"):
            stream.flush()
            setattr(sys, name, _text(number, stream))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def shown(text: str) -> str:
    """Return a text whose characters that control a terminal are written out. A file, a module or a
    folder of somebody else's may have put them into its name or message."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


class _Shown(io.TextIOWrapper):
    """A stream of texts as people shall see them."""

    def write(self, text: str) -> int:
        super().write(shown(text))
        return len(text)


class _Unread(io.FileIO):
    """A file number whose reader may go away."""

    def write(self, data) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            # what is said on standard error ends no work, whatever is wrong with it
            if self.fileno() != 2 and not isinstance(error, BrokenPipeError):
                raise
            _to_nothing(self.fileno(), os.O_WRONLY)
            return len(data)


def _text(number: int, like: io.TextIOWrapper | None = None) -> io.TextIOWrapper:
    """Return the text stream of a number, in which every name of a file can be printed."""
    raw, unbuffered = _Unread(number, "w", closefd=False), bool(like and like.write_through)
    return _Shown(
        raw if unbuffered else io.BufferedWriter(raw),  # as Python itself does with -u
        like.encoding if like else "utf-8",
        "backslashreplace",
        line_buffering=number == 2 or bool(like and like.line_buffering),
        write_through=unbuffered,
    )


def _to_nothing(number: int, mode: int) -> None:
    opened = os.open(os.devnull, mode)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)

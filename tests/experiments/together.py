"""Commands in several processes on the loopback address (`tests.experiments.many`), and what they
leave."""

import collections
import os
import socket
import subprocess
import sys

import numpy as np


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def finished(commands, timeout: float = 500, **variables) -> list[tuple[int, str, str]]:
    """Run Python programs, [module, *arguments], at once, with further environment `variables`.
    Returns [(exit status, standard output, standard error)]."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    lines = [[sys.executable, "-m", *map(str, command)] for command in commands]
    started = [subprocess.Popen(line, env=environment, **pipes) for line in lines]
    try:
        texts = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(p.returncode, _ours(o), e) for p, (o, e) in zip(started, texts, strict=True)]


def start(folder, verb, each, *flags, out="out"):
    """Run a command in processes, whose own things are in `each`: [{"when": signal, "flags": ...}].
    Returns what `finished` does."""
    port, commands = free_port(), []
    for i, own in enumerate(each):
        notes = folder / f"notes-{len(list(folder.glob('notes-*')))}"
        notes.touch()
        where = f"--distributed=127.0.0.1:{port},{len(each)},{i}"
        into = f"--out={folder / own.get('out', out)}"
        command = ["tests.experiments.many", notes, own.get("when", "0"), verb]
        commands.append([*command, *flags, where, into, *own.get("flags", ())])
    return finished(commands)


def _ours(text: str) -> str:
    """Standard output without what gloo, which connects processes on CPUs, writes there."""
    return "".join(line for line in text.splitlines(True) if not line.startswith("[Gloo]"))


def stored(folder) -> dict[str, int]:
    """How often each image was stored by all processes so far."""
    lines = [line for path in folder.glob("notes-*") for line in path.read_text().splitlines()]
    return collections.Counter(lines)


def loaded(path):
    with np.load(path) as archive:
        return {name: archive[name] for name in archive.files}

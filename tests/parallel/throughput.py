"""Images per second of one process with one core, and of two processes with one core each
(`--distributed`), in turn. Nothing else may run on the machine.

    python -m tests.parallel.throughput [--rounds=3] [--images=96] [FLAGS OF experiments.run]

Seconds are those from the first stored batch to the last, of all processes: compilation, weights
and the report do not count; exchanges after every batch do. `--batch_size` is 8 per process.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

BATCH = 8


def child(arguments: list[str]) -> None:
    """`experiments.run`, which prints when it has stored how many images."""
    from experiments.output import BatchStore
    from experiments.run.__main__ import main
    from varjax.cli import command_line

    add = BatchStore.add

    def added(self, series, index, results):
        add(self, series, index, results)
        print("stored", time.monotonic(), len(index), file=sys.stderr, flush=True)

    BatchStore.add = added
    command_line.run(main, ["experiments/run.py", *arguments])


def rate(count: int, images: int, flags: list[str]) -> float:
    """Images per second of `count` processes, each on a core of its own."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        found.close()
        made = [f"--num_images={images * count}", f"--batch_size={BATCH * count}"]
        started = []
        for i in range(count):
            where = [f"--distributed=127.0.0.1:{port},{count},{i}"] if count > 1 else []
            command = ["taskset", "-c", str(i), sys.executable, "-m", "tests.parallel.throughput"]
            command += ["--child", *made, *where, *flags, f"--out={folder}/out"]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, env=environment, **pipes))
        texts = [process.communicate()[1] for process in started]
        assert not any(process.returncode for process in started), texts
    lines = [line.split()[1:] for text in texts for line in text.splitlines() if "stored" in line]
    stored = sorted((float(at), int(n)) for at, n in lines if at.replace(".", "").isdecimal())
    first, last = stored[count - 1][0], stored[-1][0]  # all have stored their first batch
    return sum(n for at, n in stored if at > first) / (last - first)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=96, help="of each process")
    given, flags = parser.parse_known_args()
    found: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(given.rounds):
        for count, rates in found.items():
            rates.append(rate(count, given.images, flags))
            print(f"{count} process(es): {rates[-1]:.3f} images/s", flush=True)
    one, two = (statistics.median(found[count]) for count in (1, 2))
    print(f"medians {one:.3f} and {two:.3f} images/s: {two / (2 * one):.3f} of twice one process")


if __name__ == "__main__":
    child(sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main()

"""Images per second of one process with one core, of two that know nothing of each other, and of
two that work as one (`--distributed`), each with a core of its own, in turn. Two apart say what the
machine gives. Nothing else may run on it.

    python -m tests.parallel.throughput [--rounds=3] [--images=96] [FLAGS OF experiments.run]

Processes wait for each other after their first batch, by files of this script. Counted is what each
stores from then on while all of them are at work: compilation, weights and the report do not count;
what they say to each other does. `--batch_size` is 8 per process.
"""

import argparse
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time

BATCH = 8
KINDS = {
    "one": "one process",
    "apart": "two processes that know nothing of each other",
    "together": "two processes with --distributed",
}


def child(count: int, folder: pathlib.Path, arguments: list[str]) -> None:
    """`experiments.run`, which prints when it has stored how many images. It waits after its first
    batch until `count` processes have come so far, by files in the folder."""
    from experiments.output import BatchStore
    from experiments.run.__main__ import main
    from varjax.cli import command_line

    add = BatchStore.add

    def added(self, series, index, results):
        add(self, series, index, results)
        (folder / f"{os.getpid()}.ready").touch()
        while len(list(folder.glob("*.ready"))) < count:
            time.sleep(0.01)
        print("stored", time.monotonic(), len(index), file=sys.stderr, flush=True)

    BatchStore.add = added
    command_line.run(main, ["experiments/run.py", *arguments])


def rate(kind: str, images: int, flags: list[str]) -> float:
    """Images per second of a process of `images`, or of two (`KINDS`), each with its own core."""
    count = 1 if kind == "one" else 2
    with tempfile.TemporaryDirectory() as folder:
        port, started = _free_port(), []
        for i in range(count):
            own = [f"--num_images={images}", f"--batch_size={BATCH}", f"--out={folder}/{i}"]
            if kind == "together":
                own = [f"--num_images={images * 2}", f"--batch_size={BATCH * 2}"]
                own += [f"--distributed=127.0.0.1:{port},2,{i}", f"--out={folder}/out"]
            command = ["taskset", "-c", str(i), sys.executable, "-m", "tests.parallel.throughput"]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
            command += ["--child", str(count), folder, *own, *flags]
            started.append(subprocess.Popen(command, env=environment, **pipes))
        texts = [process.communicate()[1] for process in started]
        assert not any(process.returncode for process in started), texts
    each = [_stored(text) for text in texts]
    last = min(stored[-1][0] for stored in each)  # all are still at work
    return sum(_pace([(at, n) for at, n in stored if at <= last]) for stored in each)


def _pace(stored: list[tuple[float, int]]) -> float:
    """Images per second from the first batch of a process to its last."""
    return sum(n for _, n in stored[1:]) / (stored[-1][0] - stored[0][0])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _stored(text: str) -> list[tuple[float, int]]:
    """[(seconds, images)] of the batches that a process has stored."""
    lines = [line.split() for line in text.splitlines() if line.startswith("stored ")]
    return [(float(at), int(count)) for _, at, count in lines]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=96, help="of each process")
    given, flags = parser.parse_known_args()
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(given.rounds):
        for kind, rates in found.items():
            rates.append(rate(kind, given.images, flags))
            print(f"{KINDS[kind]}: {rates[-1]:.3f} images/s", flush=True)
    one, apart, together = (statistics.median(found[kind]) for kind in KINDS)
    print(f"medians: {one:.3f}, {apart:.3f}, {together:.3f} images/s")
    print(f"together {together / (2 * one):.3f} of twice one, {together / apart:.3f} of two apart")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(int(sys.argv[2]), pathlib.Path(sys.argv[3]), sys.argv[4:])
    else:
        main()

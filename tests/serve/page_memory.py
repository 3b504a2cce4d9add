"""Resident memory of a page over many choices, each of which is a program of its own.

    python -m tests.serve.page_memory 40 demo

prints the number of the choice, MiB, generators that are alive, and seconds. `small` takes a small
model instead of the demo.
"""

import os
import sys
import time
import weakref

import varjax
from experiments.serve.api import Service
from experiments.serve.studio import KEPT, Choice, Studio
from experiments.serve.subjects import subjects
from tests.serve.server import batcher_of, small_drawer
from varjax.generator import Generator

POLICIES = ("streaming", "headkv")


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def demo_drawer():
    from experiments.serve.drawer import Drawer

    model = varjax.load()
    return Drawer(model, lambda size: Generator(model, "full", batch_size=size), (1,))


def main(argv: list[str]) -> None:
    count, name = int(argv[0]), argv[1]
    drawer = small_drawer((1,)) if name == "small" else demo_drawer()
    batcher, alive = batcher_of(drawer), weakref.WeakSet()
    batcher.start()
    service = Service(
        model=drawer.model,
        subjects=subjects(drawer.model),
        batcher=batcher,
        metrics=batcher.metrics,
    )

    def make(model, plan, sampling, size, **more):
        cut = {"segments": 1} if name == "small" else {}
        found = Generator(model, plan=plan, sampling=sampling, batch_size=size, **cut, **more)
        alive.add(found)
        return found

    studio, condition = Studio(service, make), service.subjects.of("1", None)
    print(f"start {resident_mib():.1f}, {KEPT} programs are kept", flush=True)
    for number in range(count):
        policy = POLICIES[number % len(POLICIES)] if name == "demo" else "streaming"
        choice = Choice(policy, round(0.5 + number / 100, 2), drawer.model.sampling())
        start = time.perf_counter()
        for _ in studio.draw(choice, condition, number):
            pass
        seconds = time.perf_counter() - start
        print(f"{number} {resident_mib():.1f} {len(alive)} {seconds:.1f}", flush=True)
    studio.close()
    batcher.close(60)


if __name__ == "__main__":
    main(sys.argv[1:])

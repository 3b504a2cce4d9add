"""What a part of a run says when it is finished (`experiments.parts`), for `experiments.merge`."""

from experiments import parts
from experiments.generation import Run, environment
from experiments.run import results
from experiments.shards import PartStore
from varjax.generator import Generator

FIDELITY = "fidelity/"  # names of per-image numbers in a part begin so


def is_finished(store: PartStore) -> bool:
    """Return whether all of a part is there, with what it says."""
    store.scan()
    return not any(store.missing(name) for name in store.series) and parts.is_written(store)


def write(run: Run, store: PartStore, generator: Generator | None) -> None:
    """Say that a part is finished. generator: None if it has no images."""
    main, arrays = store.series["main"], {}
    if run.compare and generator is not None:
        numbers = results.compared(run, store)
        arrays = {f"{FIDELITY}{name}": values for name, values in numbers.items()}
    kinds = {
        name: {key: [dtype.str, shape] for key, (dtype, shape) in made.arrays.items()}
        for name, made in store.series.items()
    }
    content = {
        "command": "run",
        "environment": environment(),
        "shown": results.shown(run).to_json(),
        "report": generator and results.report_of(run, generator, store),
        "judges": run.judges.describe(),
        "count": main.count,
        "batch_size": main.batch_size,
        "arrays": kinds,
    }
    parts.write(store, content, arrays)

"""Results of a run: the parts of its batches that are kept, report.json, and the printed lines, the
plan before the run starts and a summary at its end."""

import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict

import numpy as np

from experiments import batch_files
from experiments.evaluation import metrics
from experiments.evaluation.metrics import METRICS
from experiments.generation import Run, aligned, cache_report, environment, time_report
from experiments.output import BatchStore
from experiments.parts import PartStore
from experiments.prompts.condition import Text
from experiments.run import files
from experiments.run.files import Shown
from varjax.core.maps import bicubic_matrix
from varjax.generation import cost, memory
from varjax.generation import kept as kept_tokens
from varjax.generation.generator import Generator
from varjax.storage import parameters
from varjax.storage.parameters import peak_bytes
from varjax.storage.pictures import check_finite, to_uint8

Arrays = dict[str, np.ndarray]
FIDELITY = "fidelity/"  # names of per-image numbers in a part begin so
OF_FULL = "class_agreement_full"  # of the full cache's own pictures


def kept(run: Run, results: dict[str, np.ndarray], main: bool) -> dict[str, np.ndarray]:
    """Return the arrays of a batch that are stored. main: it is the policy's, not the full cache's.
    Images are resized as by torch's bicubic mode without antialiasing, and stored as bytes, unless
    the run needs exact ones. `UserError` for images that are not finite."""
    check_finite(results["images"])
    told = {}
    if run.save_kept and main:
        contents, count = results.get("contents"), len(results["images"])
        told["keep"] = kept_tokens.of_batch(run.plan, contents, count)
    if run.resize:
        pictures, side = results["images"], run.resize
        rows, columns = (bicubic_matrix(length, side) for length in pictures.shape[1:3])
        found = np.einsum("bhwc,ih,jw->bijc", pictures, rows, columns, optimize=True)
        results = results | {"images": np.clip(found, 0, 1).astype(np.float32)}
    if run.save_arrays:
        names = ("images", "tokens", "code_map", "logits")
        found = {name: results[name] for name in names if name in results}
        if "logits" in found:  # of the policy: its tokens are written, too
            model = run.model
            tokens = model.token_arrays.tokens_to_file(found["tokens"])
            found[model.transformer.token_name] = tokens
        return found | told
    exact = results["images"] if run.compare else to_uint8(results["images"])
    return {"images": exact, "tokens": results["tokens"], **told}


def shown(run: Run) -> Shown:
    """Return what the files say besides the batches."""
    names = (run.model.transformer.token_name, "code_map", "images", "logits")
    captions = run.condition.captions
    height, width = (run.resize, run.resize) if run.resize else run.model.pixels
    return Shown(
        numbers=run.condition.numbers,
        captions=captions and list(captions[: max(1, files.GRID_PIXELS // (height * width))]),
        prompts=getattr(run.condition, "prompts", None),
        each=getattr(run.condition, "each", 1),
        seed=run.seed,
        arrays=names if run.save_arrays else None,
        kept=kept_tokens.layout(run.plan) if run.save_kept else None,
    )


def finish(
    run: Run, store: BatchStore, generator: Generator, full: Generator | None = None
) -> dict:
    """Write all results into the final folder and return the report. full: to compare with."""
    report = report_of(run, generator, store)
    # a first batch takes longer than others
    if full and min(len(full.timing.runs), len(generator.timing.runs)) > 1:
        report["time"]["full_s_per_image"] = time_report(full)["steady_s_per_image"]
    if run.compare:
        report["fidelity"] = fidelity(compared(run, store), run.judges.describe())
    files.write_run(store, shown(run), report)
    return report


# --- report.json ----------------------------------------------------------------------------------


def report_of(run: Run, generator: Generator, store: BatchStore) -> dict:
    """Return the content of report.json. Byte counts are for one batch."""
    analysis, timing = generator.program.codes.memory_analysis(), generator.timing
    condition, warm = run.condition, timing.cache == "warm"
    # what the cache carries beside K and V: positions, observations, states
    carried = cost.tree_bytes(generator.program.codes.in_avals[0][1]) - generator.allocated_bytes
    # a device decodes in chunks of one size (`segments.map_in_chunks`)
    count = run.batch_size // run.program.mesh.data
    decoding, codec = run.program.build.decoding, run.model.codec
    most = decoding.images_at_once(codec, run.model.code_map[:2], count)
    return {
        **run.describe(),
        "num_images": len(run.condition),
        "resumed": store.resumed,
        "recipe": run.recipe,
        **environment(),
        "kv": {**cache_report(generator), "bookkeeping_bytes": carried},
        "remarks": list(run.remarks),
        "attention_flops_per_image": cost.attention_flops(generator.plan, generator.spec),
        "memory": {
            "arguments_bytes": analysis.argument_size_in_bytes,
            "temporary_bytes": analysis.temp_size_in_bytes,
            "decode_batch": -(-count // -(-count // most)),
            # Peaks of the compiled programs, which run one after the other. Memory of one is free
            # in the next, except for weights that stay.
            "phases": {
                "text": condition.peak_bytes if isinstance(condition, Text) else None,
                "transformer": peak_bytes(generator.program.codes),
                "decode": peak_bytes(generator.program.pixels),
            },
        },
        "time": {
            **time_report(generator),
            # cold: the programs were compiled; warm: they came from the compilation cache
            "compile_cold_s": None if warm else timing.compile_s,
            "compile_warm_s": timing.compile_s if warm else None,
            "compilation_cache": timing.cache,
            "runs": timing.runs,
        },
        "segments_used": [[s.start, s.stop, s.length] for s in generator.spec.segments],
        "layers_used": generator.layers,
    }


def compared(run: Run, store: BatchStore) -> Arrays:
    """Return per-image numbers: pictures and tokens compared with the full cache's. Networks judge
    the pictures as they are written, as bytes."""
    found, labels = [], run.condition.numbers
    for index, mine, full in _both(store.batches("main"), store.batches("full")):
        close = metrics.compare_images(full, mine)
        theirs, ours = to_uint8(full["images"]), to_uint8(mine["images"])
        found.append(close | run.judges.numbers(theirs, ours, labels[index]))
        if (agrees := run.judges.agreement(theirs, labels[index])) is not None:
            found[-1][OF_FULL] = agrees
    return metrics.joined(found)


def _both(ours: Iterator, theirs: Iterator) -> Iterator[tuple[np.ndarray, Arrays, Arrays]]:
    """Yield (numbers, arrays of one series, of another), whose files may end at other images."""
    other, held = np.zeros(0, int), {}
    for index, arrays in ours:
        while len(index):
            if not len(other):
                other, held = next(theirs)
            count = min(len(index), len(other))
            some = ({name: a[:count] for name, a in part.items()} for part in (arrays, held))
            yield index[:count], *some
            arrays, held = ({n: a[count:] for n, a in part.items()} for part in (arrays, held))
            index, other = index[count:], other[count:]


def fidelity(arrays: Arrays, judges: Mapping) -> dict:
    """Return the report's `fidelity` from per-image numbers of all images (`compared`). judges:
    which networks they are."""
    of_full = {name: float(a.mean()) for name, a in arrays.items() if name == OF_FULL}
    rest = {name: a for name, a in arrays.items() if name != OF_FULL}
    psnr = {"psnr_per_image": metrics.capped(rest)["psnr"]}
    return {**metrics.summarize(rest), **psnr, **of_full, **judges}


def write_part(run: Run, store: PartStore, generator: Generator | None) -> None:
    """Say that a part is finished, for `experiments.merge`. generator: None if it has no images."""
    main, arrays, said = store.series["main"], {}, shown(run)
    if run.compare and generator is not None:
        numbers = compared(run, store)
        arrays = {f"{FIDELITY}{name}": values for name, values in numbers.items()}
    content = {
        "command": "run",
        "environment": environment(),
        "shown": asdict(said) | {"numbers": said.numbers.tolist()},
        "report": generator and report_of(run, generator, store),
        "judges": run.judges.describe(),
        "count": main.count,
        "batch_size": main.batch_size,
        "series": list(store.series),
    }
    batch_files.write_batch(store.work.path / batch_files.PART, store.work.digest, arrays, content)


# --- text -----------------------------------------------------------------------------------------


def plan_line(run: Run) -> str:
    """Return one line about the plan, printed before compiling."""
    plan, batch = run.plan, run.batch_size
    planned = plan.allocated_bytes(batch, run.program.kv_dtype, run.program.mesh.model)
    dense = plan.dense_bytes(batch, run.program.kv_dtype)
    return (
        f"{run.model.name}: {len(run.condition)} images in batches of {batch}; {run.policy.name} "
        f"keeps {memory.show_bytes(planned)} of "
        f"{memory.show_bytes(dense)} KV cache ({planned / max(1, dense):.1%}), blocks of "
        f"{plan.block_size}"
    )


def dry_run_text(run: Run) -> str:
    """Return the plan and predicted bytes, for --dry_run."""
    plan, batch = run.plan, run.batch_size
    dense = plan.dense_bytes(batch, run.program.kv_dtype)
    mesh = run.program.mesh
    need = run.program.predict_here(run.model, plan, batch // mesh.data, run.condition)
    pool = plan.allocated_bytes(batch, run.program.kv_dtype, mesh.model)
    carried = need.kv_pool * mesh.num_devices - pool  # positions, observations, states
    parts = (run.model.transformer, run.model.codec)
    transformer, codec = (f"{parameters.count(part) / 1e6:.1f} M" for part in parts)
    rows = [
        ("model", run.model.name),
        ("parameters", f"{transformer} transformer, {codec} codec"),
        ("schedule", str(plan.geometry.schedule)),
        (
            "policy",
            f"{run.policy.name}, budget {run.policy.budget:g}, accounting {plan.accounting}",
        ),
        (
            "batch",
            f"{batch} images, {batch * plan.geometry.rows_per_image} rows, {run.program.dtype}, "
            f"weights in {run.program.weights_dtype}, cache in {run.program.kv_dtype}",
        ),
        ("full cache", memory.show_bytes(dense)),
        (
            "KV pool",
            f"{memory.show_bytes(pool)} ({pool / max(1, dense):.2%} of full), "
            f"{plan.pool_blocks} blocks of {plan.block_size}",
        ),
        ("bookkeeping", memory.show_bytes(carried)),
        ("peak live tokens", f"{plan.peak_live_fraction:.2%} of full"),
        ("weights", memory.show_bytes(need.weights)),
    ]
    if reads := plan.reads:
        rows.append(("reads", reads))
    if (length := getattr(run.condition, "padded_length", None)) is not None:
        taken = memory.show_bytes(need.condition)
        rows.append(("text", f"{taken}, keys and values of {length} tokens"))
    rows += [
        ("activations", f"about {memory.show_bytes(need.activations)}"),
        ("total", f"about {memory.show_bytes(need.total)}"),
    ]
    if mesh.num_devices > 1:
        said = f"{mesh}: weights, activations and total, with its part of the pool"
        rows.append(("each device", said))
    return "\n".join([aligned(rows), *run.remarks])


def summary(report: dict, out: pathlib.Path) -> str:
    """Return the lines that are printed at the end of a run."""
    kv, seconds = report["kv"], report["time"]
    steady, read = seconds["steady_s_per_image"], kv["read_fraction"]
    full = seconds.get("full_s_per_image")
    beside = "" if full is None else f" (full cache: {full:.3f} s)"
    rows = [
        ("policy", f"{report['policy']}, budget {report['budget']:g}"),
        (
            "images",
            f"{report['num_images']} ({report['model']}, {report['device']}, {report['dtype']})",
        ),
        ("full KV cache", memory.show_bytes(kv["dense_bytes"])),
        ("allocated KV", f"{memory.show_bytes(kv['allocated_bytes'])} ({kv['fraction']:.1%})"),
        ("peak live tokens", f"{kv['peak_live_fraction']:.1%}"),
        *([("read by a query", f"{read:.1%}")] if read is not None else []),
        ("compile", f"{seconds['compile_s']:.1f} s (cache {seconds['compilation_cache']})"),
        ("time per image", "-" if steady is None else f"{steady:.3f} s{beside}"),
    ]
    close = report.get("fidelity", {})
    for key, metric in METRICS.items():
        if key in close:  # beside what is no distance to the full cache the full cache's own
            full = close.get(f"{key}_full")
            of_full = "" if full is None else f" (full cache: {metric.show(full)})"
            rows.append((metric.label, metric.show(close[key]) + of_full))
    return aligned([*rows, ("written to", str(out))])

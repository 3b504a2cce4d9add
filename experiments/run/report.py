"""What a run says: report.json, the plan before it starts, the short table on standard output."""

import pathlib

from experiments.generation import cache_report, environment, time_report
from experiments.prompts.condition import encoding_bytes, text_tokens
from experiments.run.phases import generation_phases
from experiments.run.run import Run
from varjax import metrics
from varjax.engine import memory, program
from varjax.generator import Generator
from varjax.metrics import METRICS
from varjax.models import parameters


def build(run: Run, generator: Generator, close: dict | None, *, resumed: bool) -> dict:
    """The content of report.json. Byte counts are for one batch. close: `closeness` to the full
    cache, if it was run."""
    analysis, timing = generator.compiled.memory_analysis(), generator.timing
    warm, steady = timing.cache == "warm", time_report(generator)
    report = {
        **run.describe(),
        "num_images": len(run.condition),
        "resumed": resumed,
        **environment(),
        "kv": {
            **cache_report(generator, run.program.dense_dtype),
            "dense_dtype": run.program.dense_dtype,
            "bookkeeping_bytes": generator.bookkeeping_bytes,
        },
        "remarks": list(run.remarks),
        "attention_flops_per_image": generator.attention_flops(),
        "memory": {
            "arguments_bytes": analysis.argument_size_in_bytes,
            "temporary_bytes": analysis.temp_size_in_bytes,
            "decode_batch": decoded_at_once(run),
            "phases": generation_phases(generator, encoding_bytes(run.condition)),
        },
        "time": {
            **steady,
            # by where the programs came from: compiled (cold) or the compilation cache (warm)
            "compile_cold_s": None if warm else timing.compile_s,
            "compile_warm_s": timing.compile_s if warm else None,
            "compilation_cache": timing.cache,
            "runs": timing.runs,
        },
        "segments_used": [[s.start, s.stop, s.length] for s in generator.segments],
    }
    return report if close is None else report | {"fidelity": close}


def decoded_at_once(run: Run) -> int:
    """Images that a device decodes to pixels at a time; chunks are of equal size
    (`chunks.map_in_chunks`)."""
    images = run.batch_size // run.program.mesh.data
    code_map = run.model.config.code_map[:2]
    most = run.program.decode_batch or program.decoder_batch(run.model.codec, code_map, images)
    chunks = -(-images // most)
    return -(-images // chunks)


def closeness(arrays: dict) -> dict:
    """The report's `fidelity` from per-image numbers (`metrics.per_image`)."""
    decibels = metrics.capped(arrays)["psnr"]
    return metrics.summarize(arrays) | {"psnr_per_image": decibels}


# --- text -----------------------------------------------------------------------------------------


def plan_line(run: Run) -> str:
    """One line about the plan, printed before compiling."""
    plan, batch = run.plan, run.batch_size
    planned = plan.num_bytes(batch, run.program.kv_dtype)
    dense = plan.dense_bytes(batch, run.program.dense_dtype)
    return (
        f"{run.model.name}: {len(run.condition)} images in batches of {batch}; {run.policy.name} "
        f"keeps {memory.show_bytes(planned)} of "
        f"{memory.show_bytes(dense)} KV cache ({planned / max(1, dense):.1%}), blocks of "
        f"{plan.block_size}"
    )


def dry_run_text(run: Run) -> str:
    """The plan and predicted bytes."""
    plan, batch = run.plan, run.batch_size
    dense = plan.dense_bytes(batch, run.program.dense_dtype)
    need = run.program.predict_here(run.model, plan, batch, run.condition)
    rows = [
        ("model", run.model.name),
        (
            "parameters",
            f"{_millions(run.model.transformer)} M transformer, {_millions(run.model.codec)} M "
            f"codec",
        ),
        ("schedule", str(plan.geometry.schedule)),
        (
            "policy",
            f"{run.policy.name}, budget {run.policy.budget:g}, accounting {plan.accounting}",
        ),
        (
            "batch",
            f"{batch} images, {batch * plan.geometry.rows_per_image} rows, {run.program.dtype}, "
            f"cache in {run.program.kv_dtype}",
        ),
        ("full cache", memory.show_bytes(dense)),
        (
            "KV pool",
            f"{memory.show_bytes(need.kv_pool)} ({need.kv_pool / max(1, dense):.2%} of full), "
            f"{plan.pool_blocks} blocks of {plan.block_size}",
        ),
        ("peak live tokens", f"{plan.peak_live_fraction:.2%} of full"),
        ("weights", memory.show_bytes(need.weights)),
        *_text_row(run, need.condition),
        ("activations", f"about {memory.show_bytes(need.activations)}"),
        ("total", f"about {memory.show_bytes(need.total)}"),
    ]
    return "\n".join([_columns(rows), *run.remarks])


def _text_row(run: Run, num_bytes: int) -> list[tuple[str, str]]:
    length = text_tokens(run.condition)
    if length is None:
        return []
    return [("text", f"{memory.show_bytes(num_bytes)}, keys and values of {length} tokens")]


def _millions(module) -> str:
    return f"{parameters.count(module) / 1e6:.1f}"


def table(report: dict, out: pathlib.Path) -> str:
    """The short table at the end of a run."""
    kv, seconds = report["kv"], report["time"]
    steady = seconds["steady_s_per_image"]
    rows = [
        ("policy", f"{report['policy']}, budget {report['budget']:g}"),
        (
            "images",
            f"{report['num_images']} ({report['model']}, {report['device']}, {report['dtype']})",
        ),
        ("full KV cache", memory.show_bytes(kv["dense_bytes"])),
        ("allocated KV", f"{memory.show_bytes(kv['allocated_bytes'])} ({kv['fraction']:.1%})"),
        ("peak live tokens", f"{kv['peak_live_fraction']:.1%}"),
        ("compile", f"{seconds['compile_s']:.1f} s (cache {seconds['compilation_cache']})"),
        ("time per image", "-" if steady is None else f"{steady:.3f} s"),
    ]
    close = report.get("fidelity", {})
    rows += [(m.label, m.show(close[key])) for key, m in METRICS.items() if key in close]
    return _columns([*rows, ("written to", str(out))])


def _columns(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows)

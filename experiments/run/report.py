"""What a run says: report.json, the plan before it starts, the short table on standard output."""

import pathlib

import jax
import numpy as np

import varjax
from experiments.fidelity import HIGHEST_PSNR, summarize
from experiments.prompts.condition import encoding_bytes, text_tokens
from experiments.run.phases import generation_phases
from experiments.run.settings import RunSettings
from experiments.settings import runs_kernels
from varjax.api import Generator, Timing
from varjax.engine import memory, program
from varjax.models import parameters


def build(run: RunSettings, generator: Generator, close: dict | None, *, resumed: bool) -> dict:
    """The content of report.json. Byte counts are for one batch; `allocated` is read off the
    compiled program. close: `closeness` to the full cache, if it was run."""
    plan, batch = run.plan, run.batch_size
    dense = plan.dense_bytes(batch, run.dense_dtype)
    analysis = generator.compiled.memory_analysis()
    report = {
        **run.describe(),
        "num_images": len(run.condition),
        "resumed": resumed,
        "device": device_name(),
        "versions": {"varjax": varjax.__version__, "jax": jax.__version__, "numpy": np.__version__},
        "kv": {
            "dtype": str(run.kv_dtype),
            "dense_dtype": str(run.dense_dtype),
            "dense_bytes": dense,
            "planned_bytes": plan.num_bytes(batch, run.kv_dtype),
            "allocated_bytes": generator.allocated_bytes,
            "fraction": generator.allocated_bytes / max(1, dense),
            "peak_live_fraction": plan.peak_live_fraction,
            "block_size": plan.block_size,
            "pool_blocks": plan.pool_blocks,
            "accounting": plan.accounting,
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
            **compile_times(generator.timing),
            "first_run_s": generator.timing.first_run_s,
            "steady_s_per_image": generator.steady_seconds_per_image(),
        },
        "segments_used": [[s.start, s.stop, s.length] for s in generator.segments],
    }
    return report if close is None else report | {"fidelity": close}


def decoded_at_once(run: RunSettings) -> int:
    """Images that a device decodes to pixels at a time; rounds are of equal size
    (`rounds.map_in_chunks`)."""
    images = run.batch_size // run.mesh.data
    code_map = run.model.transformer.config.code_map[:2]
    most = run.decode_batch or program.decoder_batch(run.model.codec, code_map, images)
    rounds = -(-images // most)
    return -(-images // rounds)


def closeness(arrays: dict) -> dict:
    """The report's `fidelity` from per-image numbers (`fidelity.per_image`)."""
    decibels = np.minimum(arrays["psnr"], HIGHEST_PSNR)
    return summarize(arrays) | {"psnr_per_image": decibels}


def compile_times(timing: Timing) -> dict[str, float | str | None]:
    """Seconds until the programs were ready, also by where they came from: compiled (cold) or the
    compilation cache (warm)."""
    warm = timing.cache == "warm"
    return {
        "compile_s": timing.compile_s,
        "compile_cold_s": None if warm else timing.compile_s,
        "compile_warm_s": timing.compile_s if warm else None,
        "compilation_cache": timing.cache,
    }


def device_name() -> str:
    device = jax.devices()[0]
    return f"{device.platform}: {device.device_kind}"


# --- text -----------------------------------------------------------------------------------------


def plan_line(run: RunSettings) -> str:
    """One line about the plan, printed before compiling."""
    plan, batch = run.plan, run.batch_size
    planned = plan.num_bytes(batch, run.kv_dtype)
    dense = plan.dense_bytes(batch, run.dense_dtype)
    return (
        f"{run.model.name}: {len(run.condition)} images in batches of {batch}; {run.policy.name} "
        f"keeps {memory.show_bytes(planned)} of "
        f"{memory.show_bytes(dense)} KV cache ({planned / max(1, dense):.1%}), blocks of "
        f"{plan.block_size}"
    )


def dry_run_text(run: RunSettings) -> str:
    """The plan and predicted bytes."""
    plan, batch = run.plan, run.batch_size
    dense = plan.dense_bytes(batch, run.dense_dtype)
    need = memory.predict(
        *(plan, run.model.transformer, run.model.codec, batch, run.dtype, run.kv_dtype),
        kernels=runs_kernels(run.attention, plan),
        text_tokens=text_tokens(run.condition),
        decode_batch=run.decode_batch,
    )
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
            f"{batch} images, {batch * plan.geometry.rows_per_image} rows, {run.dtype}, cache "
            f"in {run.kv_dtype}",
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


def _text_row(run: RunSettings, num_bytes: int) -> list[tuple[str, str]]:
    length = text_tokens(run.condition)
    if length is None:
        return []
    return [("text", f"{memory.show_bytes(num_bytes)}, keys and values of {length} tokens")]


def _millions(module) -> str:
    return f"{parameters.count(module) / 1e6:.1f}"


def table(report: dict, out: pathlib.Path) -> str:
    """The short table at the end of a run."""
    kv, seconds = report["kv"], report["time"]
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
        ("time per image", f"{seconds['steady_s_per_image']:.3f} s"),
    ]
    if "fidelity" in report:
        close = report["fidelity"]
        rows += [
            ("PSNR to full cache", f"{float(close['psnr']):.2f} dB"),
            ("SSIM to full cache", f"{close['ssim']:.4f}"),
            ("token agreement", f"{close['token_agreement']:.1%}"),
        ]
    return _columns([*rows, ("written to", str(out))])


def _columns(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows)

"""What a run leaves behind: pictures, arrays, report.json, and the short table on standard
output."""

import json
import pathlib

import jax
import numpy as np

import varjax
from experiments.run_folder import RunFolder
from experiments.run_settings import RunSettings
from experiments.settings import runs_kernels
from varjax import extras, images, memory
from varjax.folders import replacing
from varjax.generation import Generator, Timing
from varjax.metrics import pixel

HIGHEST_PSNR = 100.0  # dB: identical images have an infinite PSNR, which means and JSON cannot hold


def finish(run: RunSettings, folder: RunFolder, generator: Generator) -> dict:
    """Write all results at once into the final folder and return the report."""
    arrays = folder.collect("main")
    reference = folder.collect("full") if run.compare else None
    report = build(run, generator, arrays, reference, resumed=folder.resumed)
    with replacing(folder.out, overwrite=folder.overwrite) as out:
        _write_pictures(out, run, arrays["images"])
        if run.save_arrays:
            _write_arrays(out, arrays)
        text = json.dumps(pixel.json_safe(report), indent=1, ensure_ascii=False)
        (out / "report.json").write_text(text + "\n", encoding="utf-8")
    folder.close()
    return report


def _write_pictures(out: pathlib.Path, run: RunSettings, pixels: np.ndarray) -> None:
    bytes_ = images.to_uint8(pixels)
    images.save_samples_npz(out / "samples.npz", bytes_, run.labels)
    names = run.model.metadata.get("class_names")
    captions = [names[i] for i in run.labels] if names else None
    try:
        images.save_grid(out / "grid.png", bytes_, labels=captions)
    except extras.MissingExtra as error:
        print(f"grid.png is not written: {error}", flush=True)


def _write_arrays(out: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez(
        out / "arrays.npz",
        tokens=arrays["tokens"].astype(np.int32),
        code_map=np.moveaxis(arrays["code_map"], -1, 1),
        images=np.moveaxis(arrays["images"], -1, 1),
        logits=arrays["logits"],
    )


def build(
    run: RunSettings, generator: Generator, arrays: dict, reference: dict | None, *, resumed: bool
) -> dict:
    """The content of report.json. Byte counts are for one batch; `allocated` is read off the
    compiled program."""
    plan, batch = run.plan, run.batch_size
    dense = plan.dense_bytes(batch, run.dense_dtype)
    analysis = generator.compiled.memory_analysis()
    report = {
        **run.describe(),
        "schedule": [list(pair) for pair in plan.geometry.schedule.maps],
        "num_images": len(run.labels),
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
        },
        "time": {
            **compile_times(generator.timing),
            "first_run_s": generator.timing.first_run_s,
            "steady_s_per_image": generator.steady_seconds_per_image(),
        },
        "segments_used": [[s.start, s.stop, s.length] for s in generator.segments],
    }
    if reference is not None:
        report["fidelity"] = fidelity(arrays, reference)
    return report


def fidelity(arrays: dict, reference: dict) -> dict:
    """Closeness to the full cache on the same seeds.

    psnr is the mean over images, each at most `HIGHEST_PSNR`, which identical images have; those
    are also counted.
    """
    decibels = pixel.psnr(arrays["images"], reference["images"])
    identical = int(np.isinf(decibels).sum())
    decibels = np.minimum(decibels, HIGHEST_PSNR)
    return {
        "psnr": float(decibels.mean()),
        "ssim": float(pixel.ssim(arrays["images"], reference["images"]).mean()),
        "token_agreement": pixel.token_agreement(arrays["tokens"], reference["tokens"]),
        "identical_images": identical,
        "psnr_per_image": decibels,
    }


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
        f"{run.model.name}: {len(run.labels)} images in batches of {batch}; {run.policy.name} "
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
        ("activations", f"about {memory.show_bytes(need.activations)}"),
        ("total", f"about {memory.show_bytes(need.total)}"),
    ]
    return "\n".join([_columns(rows), *run.remarks])


def _millions(module) -> str:
    from varjax.models import parameters

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

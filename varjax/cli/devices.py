"""Why JAX has no device to run on, in one line."""

import importlib.metadata
import importlib.util

import jax

EXTRAS = {"cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}  # of pyproject.toml, by platform


def why_none(error: Exception) -> str | None:
    """Return why there is no device of the platforms that JAX was told to use (JAX_PLATFORMS);
    None if this is not what the error says."""
    told = jax.config.values.get("jax_platform_name")
    name = "jax_platform_name" if told else "jax_platforms"
    told = told or jax.config.jax_platforms
    if not told:
        return None
    try:
        jax.devices()
        if "initialize backend" not in str(error):  # as of several, where the first one is there
            return None
    except Exception:  # each plugin fails in its own way
        pass
    there = _installed()
    missing = [name for name in told.split(",") if name not in there]
    extras = [f"install varjax[{EXTRAS[n]}]" for n in missing if n in EXTRAS]
    why = f"{missing[0]} is not installed" if missing else "there is no such device"
    ways = " or ".join([f"choose {' or '.join(there)}", "unset it", *extras[:1]])
    return f"{name.upper()}={told}: {why}: {ways}"


def _installed() -> list[str]:
    """Return the platforms whose part of JAX is installed."""
    plugins = [entry.name for entry in importlib.metadata.entry_points(group="jax_plugins")]
    cuda = ["cuda"] * any("cuda" in name for name in plugins)
    return ["cpu", *cuda, *(["tpu"] if importlib.util.find_spec("libtpu") else [])]

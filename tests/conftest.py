"""Settings of all tests: CPU unless told otherwise, exact float32 products, markers, paths.

64-bit types stay off, as they are for users. Programs compiled and models converted by one test are
shared with the others (and other worker processes, which inherit the environment) until the tests
end.
"""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests import compilation

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported anywhere
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # commands that tests start read 300 of our files
if "VARJAX_TEST_FOLDER" not in os.environ:
    os.environ["VARJAX_TEST_FOLDER"] = tempfile.mkdtemp(prefix="varjax-test-")
    atexit.register(shutil.rmtree, os.environ["VARJAX_TEST_FOLDER"], ignore_errors=True)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(
        os.environ["VARJAX_TEST_FOLDER"], "programs"
    )
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"  # writing takes time, too
if os.environ["JAX_PLATFORMS"] == "cpu":  # nearly all of the time is compilation
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
    os.environ.setdefault("XLA_FLAGS", " ".join(compilation.quick_flags()))
# The simulators of GPUs and TPUs hold a thread of XLA's for each thread of a kernel, while it waits
# for another one that needs a thread, too: as many as there are cores may be too few.
os.environ.setdefault("PJRT_NPROC", str(max(8, os.cpu_count() or 1)))
QUICK_COMPILATION = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "true"

import jax  # noqa: E402
import jaxtyping  # noqa: E402

from tests import annotations  # noqa: E402

compilation.share_contexts()
compilation.copy_host_arrays()
annotations.install()

ROOT = Path(__file__).resolve().parents[1]
TRAINING = ROOT / "tests" / "experiments" / "training"

jax.config.update("jax_default_matmul_precision", "highest")  # parity with CPU originals
# Tracing makes and drops millions of objects: looking for cycles as often as Python does by default
# would be a seventh of all time.
gc.set_threshold(100_000, 50, 100)
MORE, MOST = 1 << 30, 6 << 30  # bytes of a worker process
_limit = 3 << 30


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run tests that take minutes")
    parser.addoption("--aot", action="store_true", help="also compile for chips that are not here")
    parser.addoption("--weights", metavar="DIR", help="folder of released weights")


def pytest_collection_modifyitems(config, items):
    """Skip, with a reason, what this machine or this call cannot run. Trainings come first: several
    tests look at one, and of the tests that are left in the end every worker process takes some."""
    items.sort(key=lambda item: TRAINING not in item.path.parents)
    for item in items:
        for reason in _reasons_to_skip(config, item):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session):
    """What is imported now stays: no search for cycles has to look at it again."""
    gc.collect()
    gc.freeze()


def _reasons_to_skip(config, item):
    if item.get_closest_marker("slow") and not config.getoption("--slow"):
        yield "takes minutes: add --slow"
    if item.get_closest_marker("aot") and not config.getoption("--aot"):
        yield "compiles for a chip that is not here: add --aot"
    if item.get_closest_marker("weights") and not config.getoption("--weights"):
        yield "needs released weights: add --weights=DIR"
    for platform in ("gpu", "tpu"):
        if item.get_closest_marker(platform) and jax.default_backend() != platform:
            yield f"needs a {platform.upper()}, jax runs on {jax.default_backend()}"


@pytest.fixture(scope="module")
def optimized():
    """Programs compiled with all passes of the compiler; the others leave out costly ones. The
    flags of `tests.compilation` stay: `XLA_FLAGS= make test` compiles as users do."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", QUICK_COMPILATION)


@pytest.fixture(scope="module", autouse=True)
def programs_are_forgotten():
    """Compiled programs do not pile up in a worker: when it has become large, all go. Until then
    small ones serve other modules as well. Little of the memory goes back to the system, so that
    the next time is when the worker has grown by `MORE`, or is as large as `MOST`."""
    yield
    global _limit
    if _resident_bytes() > _limit:
        jax.clear_caches()
        gc.collect()
        gc.freeze()
        _limit = min(_resident_bytes() + MORE, MOST)


def _resident_bytes() -> int:
    """Memory that this process holds; where that is not known, more than any."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return sys.maxsize
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def unchecked():
    """For wrong input on purpose: our own errors answer it, not the checker of annotations."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """Arrays of the original implementations that are kept in the repository."""
    return ROOT / "tests" / "fixtures"


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Reference material beside the repository; tests that need it are skipped where it is not."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip(f"the folder {path.name}/ beside the repository is not here")
    return path


@pytest.fixture(scope="session")
def weights_dir(pytestconfig) -> Path:
    """The folder given as --weights=DIR."""
    return Path(pytestconfig.getoption("--weights"))

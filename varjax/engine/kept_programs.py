"""Programs of a CPU kept on disk under their fingerprints, so that a new process neither traces nor
compiles them.

JAX's own cache finds a program by its text, which takes tracing and lowering: most of the time
until the first picture of a small model. Of many processes it also keeps what the first one
compiles only, and on a CPU a program for the device of another process is another program. Here
every process keeps its own.

    FINGERPRINT.traced    digest of the program's text, and the structure of its results
    DIGEST.program        the executable

So a change of the sources that changes no program costs one tracing. Programs of several devices,
of other platforms (where no kept one has been run) and of modules of the user's own are left to
JAX's cache.
"""

import contextlib
import hashlib
import os
import pathlib
import pickle
import tempfile
from collections.abc import Callable, Iterator

import jax
from jax.experimental import serialize_executable
from jaxtyping import PyTree

from varjax.engine import compilation_cache, fingerprint
from varjax.errors import UserError
from varjax.storage import atomic, ordinary

PLATFORMS = ("cpu",)  # others have run no kept program yet
# Who sets them wants to see JAX at work, or chooses a device.
LEFT_TO_JAX = ("jax_dump_ir_to", "jax_log_compiles", "jax_default_device")
FOLDER = "varjax"  # beside the programs that JAX keeps
TRACED, PROGRAM = ".traced", ".program"
MOST_BYTES = 2 * 2**30  # of all files: those that were not used for longest go
CHECKSUM = 32  # bytes of SHA-256 in front of a file

Trace = Callable[[], jax.stages.Traced]
Options = dict[str, bool | str]
Said = tuple[object, tuple[PyTree, ...]]


def compiled(
    trace: Trace, options: Options, kept_as: Said | None = None
) -> tuple[jax.stages.Compiled, str]:
    """Return a program, and where it came from, as `compilation_cache.Watch` says it.

    Args:
      trace: traces it; called only if no such program is kept.
      options: of the compiler.
      kept_as: of a program of one device: everything static that `trace` depends on, and what the
        program is called with, networks first; shapes may stand for arrays. None: JAX keeps it.
    """
    kept = kept_as and _Kept.of((kept_as[0], sorted(options.items())), kept_as[1])
    if kept is None:
        return _by_jax(trace().lower(), options)
    if found := kept.known():
        return found, "warm"
    lowered = trace().lower()
    if found := kept.same_text(lowered, options):
        return found, "warm"
    if not kept.can_be_written():  # as where JAX's programs came with an image
        return _by_jax(lowered, options)
    return kept.compile(lowered, options), "cold"


def _by_jax(lowered: jax.stages.Lowered, options: Options) -> tuple[jax.stages.Compiled, str]:
    # it sees this program only: helpers compile too quickly to be kept, and look cold
    with compilation_cache.Watch() as watch:
        found = lowered.compile(compiler_options=options)
    return found, watch.verdict  # which is known once the watch has ended


class _Kept:
    """Where a program is kept, and how it is read and written."""

    def __init__(self, folder: pathlib.Path, name: str, arguments: tuple[PyTree, ...]):
        self._folder, self._traced = folder, folder / (name + TRACED)
        self._tree = jax.tree.structure((arguments, {}))

    @classmethod
    def of(cls, said: object, arguments: tuple[PyTree, ...]) -> "_Kept | None":
        """None: this program is not kept here."""
        if not compilation_cache.is_on() or jax.default_backend() not in PLATFORMS:
            return None
        place = jax.config.jax_compilation_cache_dir
        left = "://" in place or any(map(jax.config.values.get, LEFT_TO_JAX))
        if left or not _are_here(arguments):
            return None
        name = fingerprint.of(said, arguments[0], arguments[1:])
        return name and cls(pathlib.Path(place, FOLDER), name, arguments)

    def known(self) -> jax.stages.Compiled | None:
        """The program of this fingerprint, if it is kept."""
        said = _read(self._traced)
        with contextlib.suppress(Exception):  # whatever it holds
            return said and self._load(*pickle.loads(said))
        return None

    def same_text(
        self, lowered: jax.stages.Lowered, options: Options
    ) -> jax.stages.Compiled | None:
        """The program of this text, if it is kept; it is known from now on."""
        self._digest = fingerprint.digest_of(
            fingerprint.surroundings(),
            repr(sorted(options.items())),
            lowered.as_text(),
            _inputs(lowered) or self._traced.stem,
        )
        found = self._load(self._digest, lowered.out_tree)
        if found:
            self._note(lowered)
        return found

    def can_be_written(self) -> bool:
        try:  # asking for permissions is not enough: for root they always look right
            self._folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._folder).close()
        except OSError:
            return False
        return True

    def compile(self, lowered: jax.stages.Lowered, options: Options) -> jax.stages.Compiled:
        """Compile the program of `same_text`, and keep it if it can be kept."""
        # what JAX has read from its cache cannot be written again
        with compilation_cache.off():
            found = lowered.compile(compiler_options=options)
        # before it runs: afterwards jaxlib cannot write it any more
        with contextlib.suppress(Exception):  # some programs cannot be, as those that call the host
            data, *_ = serialize_executable.serialize(found)
            _write(self._folder / (self._digest + PROGRAM), data)
            self._note(lowered)
            _forget(self._folder)
        return found

    def _note(self, lowered: jax.stages.Lowered) -> None:
        with contextlib.suppress(Exception):  # results of a kind that cannot be written
            _write(self._traced, pickle.dumps((self._digest, lowered.out_tree)))

    def _load(self, digest: str, out_tree: jax.tree_util.PyTreeDef) -> jax.stages.Compiled | None:
        data = _read(self._folder / (digest + PROGRAM))
        if data is None:
            return None
        with contextlib.suppress(Exception):  # whatever JAX does not like: it is compiled anew
            return serialize_executable.deserialize_and_load(
                data, self._tree, out_tree, execution_devices=jax.local_devices()[:1]
            )
        return None


def _are_here(arguments: tuple[PyTree, ...]) -> bool:
    """Whether all arrays lie where the program will be loaded for, in its usual memory."""
    here, *_ = jax.local_devices()
    usual = here.default_memory().kind
    arrays = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array)]
    return all(a.devices() == {here} and a.sharding.memory_kind in (usual, None) for a in arrays)


def _inputs(lowered: jax.stages.Lowered) -> str | None:
    """What the text does not say, because arguments that are not used do not occur in it: types of
    all, and which are used. None if this version of JAX, which does not say that in public, keeps
    it elsewhere."""
    try:
        used = sorted(lowered._lowering.compile_args["kept_var_idx"])
    except (AttributeError, KeyError, TypeError):
        return None
    return f"{jax.tree.leaves(lowered.in_avals)} {used}"


def _read(path: pathlib.Path) -> bytes | None:
    """The contents of a file of `_write`; None if there is none, or it is damaged."""
    try:
        data = ordinary.read(path, MOST_BYTES)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # of somebody else
        os.utime(path)  # it was used
    told, contents = data[:CHECKSUM], data[CHECKSUM:]
    return contents if hashlib.sha256(contents).digest() == told else None


def _write(path: pathlib.Path, contents: bytes) -> None:
    """Keep a file, if it can be written: it is only a cache."""
    # files of this name hold the same, whoever writes them: threads and processes may meet
    with contextlib.suppress(OSError, UserError), atomic.new_file(path) as file:
        file.write(hashlib.sha256(contents).digest() + contents)


def _forget(folder: pathlib.Path) -> None:
    """Remove what was not used for longest, until `MOST_BYTES` are left, or what JAX was told."""
    told = jax.config.jax_compilation_cache_max_size
    total, most = 0, min(MOST_BYTES, told) if told > 0 else MOST_BYTES
    for path, status in sorted(_files(folder), key=lambda f: f[1].st_mtime, reverse=True):
        total += status.st_size
        if total > most:
            with contextlib.suppress(OSError):  # another process removes it, too
                path.unlink()


def _files(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, os.stat_result]]:
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if path.suffix in (TRACED, PROGRAM):
                yield path, path.stat()

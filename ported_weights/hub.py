"""Published weights from the Hugging Face hub, by the name of a model.

`hub.json` says where they are. Files go to the hub's own cache (HF_HOME), are resumed there and
taken from there the next time. Each is checked: its size and SHA-256 as `hub.json` has them, else
as the hub says. What the hub says becomes a path only if it stays in the cache.
"""

import contextlib
import functools
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from varjax.errors import UserError, nearest, require, some
from varjax.storage import ordinary
from varjax.storage.names import inside

HUB = "hub"  # the value of --source
DATA = Path(__file__).with_name("hub.json")
ENDPOINT: str | None = None  # None: HF_ENDPOINT, else huggingface.co
MARGIN = 64 * 2**20  # bytes of free space that are left
LUMINA_TOKENIZER = (
    "its image tokenizer is not on the hub: get vqgan.ckpt of Chameleon from Meta and add "
    "--tokenizer_source=FILE"
)
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt")  # the first kind that a folder has is taken
_BESIDE = (".json", "spiece.model")
_NOT_FOR_US = ("tf_", "flax_", "rust_", "onnx/")
_NAMING = ("etag", "x-linked-etag", "x-repo-commit")  # headers that become names of files


@dataclass(frozen=True)
class Remote:
    """A file of a repository. size: bytes. sha256: None: the hub does not say (small files)."""

    repository: str
    commit: str
    name: str
    size: int
    sha256: str | None


@functools.cache
def _data() -> dict:
    return json.loads(DATA.read_text(encoding="utf-8"))


def names() -> list[str]:
    """Return the models that are on the hub."""
    return list(_data()["models"])


def fetch(model: str, given: Mapping[str, str | None]) -> dict[str, str]:
    """Bring the published files of a model here.

    Args:
      model: one of `names()`.
      given: {flag of `python -m ported_weights`: value} of what the user names; those are not
        fetched.

    Returns:
      {flag: file or folder here}.

    Raises:
      UserError: the model is not on the hub; no network, no permission, no space; a file that is
        not there, or not what it should be. What was loaded so far stays in the hub's cache, and
        the same command goes on from there.
    """
    if model not in names():
        raise UserError(
            f"--source=hub: {model} is not on the hub as far as we know{nearest(model, names())}: "
            f"choose one of {', '.join(names())}, or name files"
        )
    if model.startswith("lumina") and not given.get("tokenizer_source"):
        raise UserError(f"--source=hub: {model}: {LUMINA_TOKENIZER}")
    require("huggingface_hub", extra="port", purpose="--source=hub")
    wanted = {
        flag: place
        for flag, place in _data()["models"][model].items()
        if not given.get(flag) or given[flag] == HUB
    }
    with _explained(model):
        _guard()
        listings = {repo: _listing(repo) for repo in dict.fromkeys(r for r, _ in wanted.values())}
        files = {flag: _chosen(listings[repo], repo, path) for flag, (repo, path) in wanted.items()}
        _check_space(model, [file for of in files.values() for file in of])
        return {flag: _local(files[flag], path) for flag, (_, path) in wanted.items()}


def _guard() -> None:
    """Have the headers checked that the library makes names of files of."""
    import huggingface_hub

    now = huggingface_hub.get_session()
    hooks = {**now.event_hooks, "response": [_check_headers]}
    same = {"follow_redirects": now.follow_redirects, "timeout": now.timeout}
    huggingface_hub.set_client_factory(lambda: type(now)(event_hooks=hooks, **same))


def _check_headers(response) -> None:
    for header in _NAMING if response.request.method == "HEAD" else ():
        value = response.headers.get(header, "")
        if not re.fullmatch(r'(W/)?"?[\w+=-]*"?', value, re.ASCII):
            raise UserError(f"refused: the hub says {header} {value!a:.80}, which is no plain name")


def _listing(repo: str) -> list[Remote]:
    """Ask the hub what a repository holds."""
    import huggingface_hub

    api = huggingface_hub.HfApi(endpoint=ENDPOINT)
    known = _data()["repositories"].get(repo, {})
    info = api.model_info(repo, revision=known.get("revision"), files_metadata=True)
    if not re.fullmatch("[0-9a-f]{40}", str(info.sha)):
        raise UserError(f"refused: the hub says revision {info.sha!a:.80} of {repo}: it is none")
    print(f"{repo}: revision {info.sha}", file=sys.stderr, flush=True)
    found = []
    for file in info.siblings or ():
        said = known.get("files", {}).get(file.rfilename, {})
        theirs = file.lfs.sha256 if file.lfs else None
        size = said.get("size") if said.get("size") is not None else file.size
        sha256 = said.get("sha256") or theirs
        found.append(Remote(repo, info.sha, file.rfilename, int(size or 0), sha256))
    return found


def _chosen(listing: Sequence[Remote], repo: str, path: str) -> list[Remote]:
    """Return the files of a path of `hub.json`; of folders the weights of one kind and what belongs
    to them."""
    if not path.endswith("/"):
        chosen = [file for file in listing if file.name == path]
    else:
        below = [f for f in listing if path == "/" or f.name.startswith(path)]
        below = [f for f in below if not f.name.startswith(_NOT_FOR_US)]
        kinds = [kind for kind in _WEIGHTS if any(f.name.endswith(kind) for f in below)]
        ends = (*kinds[:1], *_BESIDE)
        chosen = [file for file in below if kinds and file.name.endswith(ends)]
    if not chosen:
        held = some(sorted(file.name for file in listing), 8) or "nothing"
        raise UserError(f"{repo} has no {path} with weights any more: it holds {held}")
    for file in chosen:
        inside(Path(), file.name)
    return chosen


def _check_space(model: str, files: Sequence[Remote]) -> None:
    """Raise `UserError` unless what is not here yet fits the disk of the hub's cache."""
    from huggingface_hub import constants, try_to_load_from_cache

    missing = {
        (f.repository, f.name): f.size
        for f in files
        if not isinstance(try_to_load_from_cache(f.repository, f.name, revision=f.commit), str)
    }
    place = Path(constants.HF_HUB_CACHE)
    while not place.exists():
        place = place.parent
    need, free = sum(missing.values()), shutil.disk_usage(place).free
    if need + MARGIN > free:
        raise UserError(
            f"{model} takes {need / 2**30:.1f} GiB of downloads and {place} has "
            f"{free / 2**30:.1f} GiB left: make room, or set HF_HOME to a folder on another disk"
        )
    if need:
        count = len(missing)
        print(f"{model}: {count} files, {need / 2**30:.2f} GiB", file=sys.stderr, flush=True)


def _local(files: Sequence[Remote], path: str) -> str:
    """Load files, check them, and return the file or the folder that `path` means."""
    import huggingface_hub

    for file in files:
        at = {"revision": file.commit, "endpoint": ENDPOINT}
        found = Path(huggingface_hub.hf_hub_download(file.repository, file.name, **at))
        _check(file, found)
    if not path.endswith("/"):
        return str(found)
    depth = len(Path(files[-1].name).parts)
    root = found.parents[depth - 1]
    return str(root if path == "/" else root / path.rstrip("/"))


def _check(file: Remote, found: Path) -> None:
    """Raise `UserError` unless a file is what it should be; it is then removed from the cache."""
    _check_place(file, found)
    size = found.stat().st_size
    said = None if size == file.size else f"{size} bytes, not {file.size}"
    if said is None and file.sha256:
        with ordinary.opened(found) as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != file.sha256:
            said = f"the SHA-256 {digest[:16]}..., not {file.sha256[:16]}..."
    if said:
        for damaged in {found.resolve(), found}:
            damaged.unlink(missing_ok=True)
        raise UserError(
            f"{file.name} of {file.repository} has {said}: it was removed, start the same command "
            "again; if that does not help, the repository has changed"
        )


def _check_place(file: Remote, found: Path) -> None:
    """Raise `UserError` unless a file lies in the cache, with all links followed."""
    from huggingface_hub import constants

    own = found.parents[len(Path(file.name).parts) + 1]  # of the repository; it may be a link
    real = found.resolve()
    if not any(real.is_relative_to(Path(root).resolve()) for root in (constants.HF_HUB_CACHE, own)):
        raise UserError(
            f"{file.name} of {file.repository}: {found} is a link to {real}, out of the hub's "
            "cache: neither read nor removed; remove the link, and start the same command again"
        )


@contextlib.contextmanager
def _explained(model: str) -> Iterator[None]:
    """Whatever the hub's library raises becomes one line."""
    from huggingface_hub import errors

    again = "what is here stays, and the same command goes on from there"
    try:
        yield
    except UserError:
        raise
    except errors.GatedRepoError as error:
        raise UserError(
            f"{model}: the repository asks for consent: accept its terms on its page, then log in "
            f"with `hf auth login` ({_line(error)})"
        ) from None
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{model}: the hub knows no such repository, or the token is not accepted: check "
            f"HF_TOKEN or `hf auth whoami` ({_line(error)})"
        ) from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise UserError(
            f"{model}: the hub cannot be reached: check the network (HF_HUB_OFFLINE, HF_ENDPOINT); "
            f"{again} ({_line(error)})"
        ) from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        token = ": the token is not accepted, check HF_TOKEN" if status in (401, 403) else ""
        raise UserError(f"{model}: the hub answered {status}{token} ({_line(error)})") from None
    except OSError as error:  # the disk is full, the connection ended
        reason = error.strerror or _line(error)
        raise UserError(f"{model}: the download ended: {reason}; {again}") from None
    except Exception as error:  # what its HTTP client raises has no common base with the above
        raise UserError(
            f"{model}: the hub cannot be reached: {type(error).__name__}: {_line(error)}; {again}"
        ) from None


def _line(error: Exception) -> str:
    """Return the first line of a message, which may hold a whole page."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:200]

"""Published weights from the Hugging Face hub, by the name of a model.

`hub.json` says where they are. `huggingface_hub` keeps them in its own cache (HF_HOME), goes on
with interrupted downloads and takes from there what is there. Every file is checked: its size and
SHA-256 as `hub.json` has them, else as the hub says. Names that the hub gives stay in its cache.
"""

import functools
import glob
import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from varjax.core.errors import UserError, nearest, some
from varjax.storage import ordinary
from varjax.storage.names import inside
from varjax.storage.values import require

HUB = "hub"  # the value of --source
DATA = Path(__file__).with_name("hub.json")
ENDPOINT: str | None = None  # None: HF_ENDPOINT, else huggingface.co
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt")  # the first kind that a folder has is taken
_BESIDE = (".json", "spiece.model")
_NOT_FOR_US = ("tf_", "flax_", "rust_", "onnx/")
_NAMING = ("etag", "x-linked-etag", "x-repo-commit")  # headers that become names of files


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
      given: {flag of `python -m ported_weights`: value} that the user names, not fetched.

    Returns:
      {flag: file or folder here}.

    Raises:
      UserError: the model is not on the hub; no network, no permission, no room; a file that is
        not there, or not what it should be. What was loaded so far stays in the hub's cache, and
        the same command goes on from there.
    """
    if model not in names():
        raise UserError(
            f"--source=hub: {model} is not on the hub as far as we know{nearest(model, names())}: "
            f"choose one of {', '.join(names())}, or name files"
        )
    if model.startswith("lumina") and not given.get("tokenizer_source"):
        raise UserError(
            f"--source=hub: {model}: its image tokenizer is not on the hub: get vqgan.ckpt of"
            " Chameleon from Meta and add --tokenizer_source=FILE"
        )
    require("huggingface_hub", extra="port", purpose="--source=hub")
    places = _data()["models"][model]
    wanted = {flag: place for flag, place in places.items() if given.get(flag) in (None, "", HUB)}
    try:
        _guard()
        asked = {
            name: Repository.ask(name)
            for name in dict.fromkeys(name for name, _ in wanted.values())
        }
        chosen = {flag: asked[name].chosen(path) for flag, (name, path) in wanted.items()}
        folders = {flag: asked[wanted[flag][0]].download(files) for flag, files in chosen.items()}
    except UserError:
        raise
    except Exception as error:  # errors of its HTTP client have no common base with its own
        said = str(error).strip().partition("\n")[0][:200]
        kind = type(error).__name__
        raise UserError(f"{model}: {_advice(error)} ({kind}: {said})") from None
    return {flag: str(folder / wanted[flag][1].strip("/")) for flag, folder in folders.items()}


def _advice(error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "accept the repository's terms on its page, then log in with `hf auth login`"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return "no such repository, or the token is not accepted: check `hf auth whoami`"
    return (
        "the download ended: check the network and the disk (HF_HUB_OFFLINE, HF_HOME); what is"
        " here stays, and the same command goes on from there"
    )


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


@dataclass(frozen=True)
class Repository:
    """Content of a repository at one commit. files: {name: (bytes, SHA-256 or None: unknown)}."""

    name: str
    commit: str
    files: Mapping[str, tuple[int, str | None]]

    @classmethod
    def ask(cls, name: str) -> "Repository":
        """Ask the hub; `hub.json` comes first where both say something."""
        import huggingface_hub

        known = _data()["repositories"].get(name, {})
        api = huggingface_hub.HfApi(endpoint=ENDPOINT)
        info = api.model_info(name, revision=known.get("revision"), files_metadata=True)
        if not re.fullmatch("[0-9a-f]{40}", str(info.sha)):
            raise UserError(f"refused: the hub says {name} has revision {info.sha!a:.80}")
        print(f"{name}: revision {info.sha}", file=sys.stderr, flush=True)
        files = {}
        for file in info.siblings or ():
            said = known.get("files", {}).get(file.rfilename, {})
            sha256 = said.get("sha256") or (file.lfs and file.lfs.sha256)
            files[file.rfilename] = (int(said.get("size") or file.size or 0), sha256)
        return cls(name, info.sha, files)

    def chosen(self, path: str) -> list[str]:
        """Return the files of a path of `hub.json`; of a folder the weights of one kind and what
        belongs to them. `UserError` if there are none, or a name leads out of the folder."""
        chosen = [path] if path in self.files else []
        if path.endswith("/"):
            below = [n for n in self.files if path == "/" or n.startswith(path)]
            below = [n for n in below if not n.startswith(_NOT_FOR_US)]
            kinds = [kind for kind in _WEIGHTS if any(n.endswith(kind) for n in below)]
            chosen = [n for n in below if kinds and n.endswith((kinds[0], *_BESIDE))]
        if not chosen:
            held = some(sorted(self.files), 8) or "nothing"
            raise UserError(f"{self.name} has no {path} with weights any more: it holds {held}")
        for name in chosen:
            inside(Path(), name)
        return chosen

    def download(self, names: list[str]) -> Path:
        """Return the folder of the cache in which these files lie. `UserError` for one that is not
        what it should be, which is removed, or a link out of the cache, which is not even read."""
        import huggingface_hub

        patterns = [glob.escape(name) for name in names]
        folder = Path(
            huggingface_hub.snapshot_download(
                self.name, revision=self.commit, allow_patterns=patterns, endpoint=ENDPOINT
            )
        )
        # both may be links themselves
        cache = [
            Path(huggingface_hub.constants.HF_HUB_CACHE).resolve(),
            folder.parents[1].resolve(),
        ]
        for name in names:
            found, (size, sha256) = folder / name, self.files[name]
            real = found.resolve()
            if not any(map(real.is_relative_to, cache)):
                raise UserError(
                    f"{name} of {self.name}: {found} is a link to {real}, out of the hub's cache: "
                    "neither read nor removed; remove the link, and start the same command again"
                )
            with ordinary.opened(real) as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest() if sha256 else None
            if (has := (real.stat().st_size, digest)) != (size, sha256):
                for damaged in {real, found}:
                    damaged.unlink(missing_ok=True)
                raise UserError(
                    f"{name} of {self.name} has other bytes than it should, {has} and not"
                    f" {size, sha256}: it was removed, start the same command again; if that does"
                    " not help, the repository has changed"
                )
        return folder

"""Models from the hub: any repository of safetensors, a GGUF file of one, and the published GPT-2 models by name.

A cached model is used without the network. Otherwise the hub gets a few seconds to list the repository, whatever name
servers, proxies and retries do. Then come the small files, and the weights last, after the config was understood and the
disk was found large enough: a folder with weights is complete. The library writes each file beside its place and renames
it, so that nothing half-written stays in the cache.

It must not import torch: the launcher resolves a model before it loads one. It imports the hub's library, with its HTTP
client, where that is used: a local model needs only the names.
"""

from __future__ import annotations

import difflib
import errno
import shutil
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models import families
from models.sources import checkpoint

TOKENIZERS = ("tokenizer.json", "vocab.json", "merges.txt")
FILES = (
    "config.json", "generation_config.json", *TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
REMEDY = "Use --model bard or smollm2, or a local folder, or set HF_HOME to a cache that has it"
SPARE = 64 << 20  # bytes to leave free on the disk


class HubError(ValueError):
    """The hub does not provide a model; the message is the reason alone, as a clause, and `remedy` a sentence."""

    def __init__(self, reason: str, remedy: str = REMEDY) -> None:
        super().__init__(reason)
        self.remedy = remedy


@dataclass(frozen=True)
class Repository:
    """A repository at a revision: a branch, a tag or a commit."""

    name: str
    revision: str = "main"


@dataclass(frozen=True)
class Published:
    """A published model with a short name: its repository, pinned, and what its config.json says of its shape."""

    repository: Repository
    shape: dict[str, Any]


def _gpt2(name: str, revision: str, n_layer: int, n_head: int, n_embd: int) -> Published:
    shape = {"model_type": "gpt2", "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    return Published(Repository(name, revision), shape)


PUBLISHED = {
    "gpt2": _gpt2("openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e", 12, 12, 768),
    "gpt2-medium": _gpt2("openai-community/gpt2-medium", "6dcaa7a952f72f9298047fd5137cd6e4f05f41da", 24, 16, 1024),
    "gpt2-large": _gpt2("openai-community/gpt2-large", "32b71b12589c2f8d625668d2335a01cac3249519", 36, 20, 1280),
    "gpt2-xl": _gpt2("openai-community/gpt2-xl", "15ea56dee5df4983c59b2538573817e1667135e2", 48, 25, 1600),
    "distilgpt2": _gpt2("distilbert/distilgpt2", "2290a62682d06624634c1f46a6ad5be0f47f38aa", 6, 12, 768),
}


@dataclass(frozen=True)
class Listing:
    """The commit that a revision means, and the size of each file in it."""

    commit: str
    files: Mapping[str, int] = field(default_factory=dict)


def cached(repository: Repository, weights: bool = True) -> Path | None:
    """Return the folder of a repository in the cache, or None unless it is complete."""
    names = [repository.name]
    if repository in (model.repository for model in PUBLISHED.values()):
        names.append(repository.name.rpartition("/")[2])  # before they had owners, caches held the bare name
    for name in names:
        config = cached_file(Repository(name, repository.revision), "config.json")
        if config is not None and _is_complete(config.parent, weights):
            return config.parent
    return None


def _is_complete(folder: Path, weights: bool) -> bool:
    """Whether the weights are there, and a tokenizer: other programs cache models without."""
    try:
        if weights:
            checkpoint.weight_files(folder)
        family = families.by_model_type().get(str(checkpoint.read_json(folder / "config.json").get("model_type")))
    except checkpoint.CheckpointError:
        return False
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZERS)
    return has_tokenizer or (family is not None and family.shares_tokenizer)


def cached_file(repository: Repository, file: str) -> Path | None:
    """Return a file of a repository in the cache, if it is there."""
    import huggingface_hub

    path = huggingface_hub.try_to_load_from_cache(repository.name, file, revision=repository.revision)
    return Path(path) if isinstance(path, str) else None


def fetch(repository: Repository, timeout_s: float, weights: bool = True) -> Path:
    """Return the folder of a repository, after downloading the files that are not cached.

    The hub must answer within `timeout_s` seconds; the download itself has no limit. Raises HubError, or
    CheckpointError for a model that cannot be served, before its weights are downloaded.
    """
    folder = cached(repository, weights)
    if folder is not None:
        return folder
    listing = _list(repository, timeout_s)
    if "config.json" not in listing.files:
        raise HubError(f"{repository.name} has no config.json", _instead(repository, listing))
    folder = _download(repository, "config.json", listing, timeout_s).parent
    checkpoint.read_config(folder)
    names = [name for name in FILES if name in listing.files]
    if weights:
        names += _weights(repository, listing)
    _check_space((name for name in names if not (folder / name).exists()), listing, folder)
    for name in names:
        _download(repository, name, listing, timeout_s)
    if repository.revision != listing.commit:  # let the cache know what the branch means, now that all is there
        _download(repository, "config.json", listing, timeout_s, repository.revision)
    return folder


def fetch_file(repository: Repository, file: str, timeout_s: float) -> Path:
    """Return one file of a repository, after downloading it unless it is cached. Raises HubError."""
    path = cached_file(repository, file)
    if path is not None:
        return path
    listing = _list(repository, timeout_s)
    if file not in listing.files:
        near = difflib.get_close_matches(file, listing.files, n=1, cutoff=0.3)
        remedy = f"Did you mean {near[0]!r}?" if near else "Use a file that it has"
        raise HubError(f"{repository.name} has no file {file!r}", remedy)
    from huggingface_hub import constants

    _check_space([file], listing, Path(constants.HF_HUB_CACHE))
    return _download(repository, file, listing, timeout_s, repository.revision)


def _weights(repository: Repository, listing: Listing) -> list[str]:
    """Return the names of the weights: one file, or the shards and then their index."""
    if "model.safetensors" in listing.files:
        return ["model.safetensors"]
    index = "model.safetensors.index.json"
    shards = [name for name in listing.files if name.startswith("model-") and name.endswith(".safetensors")]
    if index not in listing.files or not shards:
        raise HubError(f"{repository.name} has no safetensors", _instead(repository, listing))
    return [*sorted(shards), index]


def _instead(repository: Repository, listing: Listing) -> str:
    """Return a remedy for a repository without a checkpoint: its GGUF files, if any."""
    files = sorted(name for name in listing.files if name.endswith(".gguf"))
    if files:
        return f"Use one of its GGUF files, such as --model {repository.name}:{files[0]}"
    return "Use a repository with config.json and model.safetensors, or with a GGUF file"


def _check_space(names: Iterable[str], listing: Listing, folder: Path) -> None:
    """Raise HubError if the files `names` do not fit on the disk."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    needed, free = sum(listing.files[name] for name in names), shutil.disk_usage(existing).free
    if needed + SPARE > free:
        raise HubError(
            f"its files have {needed / 2**30:.2f} GiB, but {free / 2**30:.2f} GiB are free at {existing}",
            "Free some space, or set HF_HOME to another disk",
        )


def _list(repository: Repository, timeout_s: float) -> Listing:
    """Return what the hub has of a repository; raise HubError unless it answers in time."""
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        raise HubError("it is not in the cache, and HF_HUB_OFFLINE disables downloads")
    outcome: list[Listing | Exception] = []

    def request() -> None:
        try:
            info = huggingface_hub.HfApi().model_info(
                repository.name, revision=repository.revision, timeout=timeout_s, files_metadata=True
            )
            files = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
            outcome.append(Listing(info.sha or repository.revision, files))
        except Exception as error:  # each failure there is a reason to do without the hub
            outcome.append(error)

    # A silent name server hangs far longer than any HTTP timeout, so the thread is left behind.
    thread = threading.Thread(target=request, name="hub-probe", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        raise HubError(f"the model hub did not answer within {timeout_s:g} s")
    if isinstance(outcome[0], Exception):
        raise _refusal(outcome[0], repository, "cannot reach the model hub") from outcome[0]
    return outcome[0]


def _download(
    repository: Repository, file: str, listing: Listing, timeout_s: float, revision: str | None = None
) -> Path:
    """Return a file, downloaded unless it is cached: all of one commit, even if the branch moves meanwhile."""
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.hf_hub_download(
                repository.name, file, revision=revision or listing.commit, etag_timeout=timeout_s
            )
        )
    except Exception as error:
        raise _refusal(error, repository, f"the download of {file} failed") from error


def _refusal(error: Exception, repository: Repository, what: str) -> HubError:
    """Return the reason and the remedy for an error of the hub's library."""
    from huggingface_hub import constants, errors

    name = repository.name
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{name}"
        return HubError(f"{name} is gated", f"Accept its terms at {page}, and set HF_TOKEN to a token of your account")
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(f"{name} has no revision {repository.revision!r}", "Use a branch, a tag or a commit of it")
    if isinstance(error, errors.RepositoryNotFoundError):
        remedy = f"Check the name; if it is private, set HF_TOKEN. {REMEDY}"
        return HubError(f"the model hub has no repository {name}, or it is private", remedy)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HubError(f"{what}: {_reason(error)}", "Free some space, or set HF_HOME to another disk")
    return HubError(f"{what}: {_reason(error)}")


def _reason(error: Exception) -> str:
    """Return an error's type and first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0].rstrip(".") if lines else ""
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__

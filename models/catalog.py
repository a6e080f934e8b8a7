"""From a name or a folder to a `ResolvedModel`, which `models/weights.py` loads.

Resolving needs no torch and, for a model that is already on this machine, no network. It must not know tokenizers,
HTTP, batching or scheduling.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from models import checkpoint, families, hub
from models.architecture import Architecture
from models.checkpoint import CheckpointError

DEFAULT = "gpt2-medium"
BARD = Path(__file__).resolve().parents[1] / "weights" / "bard"
NAMES = (*hub.PUBLISHED, "bard")
REMEDY = "Use --model bard, or a local folder, or set HF_HOME to a cache that has it"


class UnknownModel(ValueError):
    """The name is neither a known model nor a folder."""


class ModelUnavailable(ValueError):
    """The requested model is known but cannot be loaded."""


@dataclass(frozen=True)
class ResolvedModel:
    """The model to serve: `config` is its config.json, `path` the folder of its files, None for random weights.

    `requested` is the user's choice (None for the default). `warning` is set when another model is served instead.
    `tokenizer` is the folder with the model's own tokenizer files, None for GPT-2's ranks.
    """

    name: str
    requested: str | None
    load_format: str
    path: Path | None
    revision: str | None
    config: dict[str, Any]
    tokenizer: Path | None
    warning: str | None = None

    @property
    def architecture(self) -> Architecture:
        """What the engine computes for this model."""
        return families.architecture_of(self.config)

    def to_json(self) -> str:
        """Return a text for `from_json`: the launcher resolves once and passes the result to its workers."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> ResolvedModel:
        """Return the model that `to_json` wrote."""
        fields = json.loads(text)
        for name in ("path", "tokenizer"):
            fields[name] = fields[name] and Path(fields[name])
        return cls(**fields)


def resolve(model: str | None, load_format: str = "auto", timeout_s: float = 10.0) -> ResolvedModel:
    """Find `model` (a name, a folder, or None for the default) without loading it.

    `load_format` "dummy" means random weights, which need only the shape. The hub gets `timeout_s` seconds to answer.
    If `model` is None and the default cannot be loaded, return bard with a warning. Raises UnknownModel,
    ModelUnavailable or CheckpointError.
    """
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load format {load_format!r} is not known. Use auto or dummy")
    name = _known_name(DEFAULT if model is None else model)
    if name is None:
        return _local(str(model), load_format)
    if name == "bard":
        return _bard(model, load_format)
    published = hub.PUBLISHED[name]
    if load_format == "dummy":
        return ResolvedModel(name, model, "dummy", None, None, published.shape, None)
    try:
        folder = hub.fetch(name, timeout_s)
    except hub.HubError as error:
        if model is not None:
            raise ModelUnavailable(f"cannot load {model}: {error}. {REMEDY}") from error
        return _bard_instead(name, load_format, error)
    config = _check_folder(folder, "auto")
    return ResolvedModel(name, model, "auto", folder, published.revision, config, _tokenizer_folder(folder))


def _known_name(model: str) -> str | None:
    """Return the name in NAMES that `model` means, with or without its owner."""
    for name, published in hub.PUBLISHED.items():
        if model in (name, published.repo):
            return name
    return "bard" if model == "bard" else None


def _local(model: str, load_format: str) -> ResolvedModel:
    folder = Path(model).expanduser()
    if folder.is_file():
        raise UnknownModel(f"model {model!r} is a file. Use the folder that contains it")
    if not folder.is_dir():
        near = difflib.get_close_matches(model, NAMES, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise UnknownModel(
            f"unknown model {model!r}, and there is no such folder. {hint}"
            f"Use one of {', '.join(NAMES)}, or a folder with a checkpoint"
        )
    folder = folder.resolve()
    config = _check_folder(folder, load_format)
    weights = folder if load_format == "auto" else None
    return ResolvedModel(folder.name, model, load_format, weights, None, config, _tokenizer_folder(folder))


def _bard(requested: str | None, load_format: str) -> ResolvedModel:
    try:
        return replace(_local(str(BARD), load_format), name="bard", requested=requested)
    except (UnknownModel, CheckpointError) as error:
        raise ModelUnavailable(
            f"the built-in model bard is incomplete ({str(error).partition('. ')[0]}). Run "
            "'git checkout weights/bard', or make it again: python tools/train_bard.py --text FILE"
        ) from error


def _bard_instead(name: str, load_format: str, error: hub.HubError) -> ResolvedModel:
    """Return bard with a warning that the default `name` cannot be loaded."""
    warning = (
        f"cannot load {name}: {error}. The small built-in model bard is served INSTEAD; "
        f"it knows only Shakespeare. Set HF_HOME to a cache that has {name}, "
        "connect this machine to the hub, or use --model bard to choose it"
    )
    try:
        return replace(_bard(None, load_format), warning=warning)
    except ModelUnavailable as second:
        raise ModelUnavailable(f"cannot load {name}: {error}; and {second}") from error


def _check_folder(folder: Path, load_format: str) -> dict[str, Any]:
    """Return the config of the checkpoint in `folder`, after comparing it with the tensors that are stored."""
    config = checkpoint.read_config(folder)
    if load_format == "dummy":
        return config
    stored = checkpoint.folder_shapes(folder, families.family_of(config).layout)
    checkpoint.check_shapes(stored, config, folder)
    return config


def _tokenizer_folder(folder: Path) -> Path | None:
    files = ("tokenizer.json", "vocab.json", "merges.txt")
    return folder if any((folder / name).is_file() for name in files) else None

"""Number formats by name, and a model loaded in one of them by the server's own code.

A name has parts joined by "+": a `--dtype`, a `--quantize`, and a `--kv-dtype` followed by "-kv". So "int8" is
`--quantize int8`, "int8-kv" is `--kv-dtype int8`, and "int8+int8-kv" is both. What the server's settings lack is not a
format here either. It must not know what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import cast

from api.service import LoadedEngine
from config import Config
from generate.runner import Runner
from launch.engine import load_engine
from models.sources.catalog import ModelUnavailable, UnknownModel
from models.sources.checkpoint import CheckpointError
from terminal.options import Choice

DTYPES = ("float32", "bfloat16", "float16")
NONE = ("", "auto", "none", "off")  # the values of a setting that leave a model as it is
MODEL_ERRORS = (CheckpointError, ModelUnavailable, UnknownModel)
BOUNDS = {"as-stored": 0.005, "int8": 0.005, "int4": 0.03, "int8-kv": 0.003}  # change in bits per byte, as a fraction


class FormatError(ValueError):
    """A format that does not exist or that cannot run here."""


def known() -> dict[str, tuple[str, str]]:
    """Return the parts of names, each with its setting and the setting's value."""
    result = {}
    for field in fields(Config):
        kind = field.metadata["type"]
        if field.name in ("dtype", "quantize", "kv_dtype") and isinstance(kind, Choice):
            suffix = "-kv" if field.name == "kv_dtype" else ""
            values = [value for value in kind.known if value not in NONE and not (suffix and value in DTYPES)]
            result.update({value + suffix: (field.name, value) for value in values})
    return result


def settings(name: str) -> dict[str, str]:
    """Return the settings of a format. FormatError for a part that is not known or two of the same setting."""
    parts = known()
    result: dict[str, str] = {}
    for part in name.split("+"):
        if part not in parts:
            raise FormatError(f"{part!r} is not a format of this version. Use one of {', '.join(parts)}")
        key, value = parts[part]
        if key in result:
            raise FormatError(f"{name!r} has two values for --{key.replace('_', '-')}. Use one of them")
        result[key] = value
    return {"dtype": "bfloat16", **result}


def bound(name: str) -> float | None:
    """Return how much worse a format may be, as a fraction of bfloat16's bits per byte; None for no bound."""
    bounds = [BOUNDS[part] for part in name.split("+") if part in BOUNDS]
    return sum(bounds) if bounds else None


def load(name: str, model: str, load_format: str = "auto", device: str = "cpu", threads: int = 0) -> LoadedEngine:
    """Return the engine for `model` in a format, with its loop stopped. FormatError where it cannot run."""
    config = Config(
        policy="dynamic", model=model, load_format=load_format, device=device, compute_threads=threads,
        **settings(name),  # type: ignore[arg-type]
    )  # fmt: skip
    try:
        engine = load_engine(config)
    except MODEL_ERRORS:
        raise
    except ValueError as error:
        raise FormatError(f"{model} cannot run in {name} here: {error}") from error
    engine.manager.stop()
    return engine


def runner_of(engine: LoadedEngine) -> Runner:
    """Return what computes the engine's steps."""
    return cast(Runner, engine.manager.model)


def check(names: Sequence[str]) -> None:
    """Raise FormatError for a name that is not a format, before anything is loaded."""
    for name in names:
        settings(name)

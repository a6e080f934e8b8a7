"""A folder with a checkpoint: its config and its files, checked before a weight is read.

It reads JSON and safetensors headers only, so that a wrong folder is refused at once, by name and with the remedy. It
must not import torch; `models/weights.py` reads the tensors. It must not know a single family.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from models import families, tensors
from models.architecture import Architecture
from models.family import ConfigError, Layout
from models.tensors import Shapes

LONGEST_CONFIG = 100_000  # bytes; the launcher passes it to its worker in the environment
FLOATS = ("F64", "F32", "F16", "BF16")


class CheckpointError(ValueError):
    """The files do not hold a model that can be served; the message gives the reason and the remedy."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of the checkpoint in `folder`, after checking that its model can be served."""
    path = folder / "config.json"
    raw = read_config_file(path, "of a transformers model")
    architecture_of(raw, path)
    return raw


def read_config_file(path: Path, writer: str) -> dict[str, Any]:
    """Return the settings in a file that save_pretrained `writer` wrote."""
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}. Use a folder that save_pretrained {writer} wrote")
    if path.stat().st_size > LONGEST_CONFIG:
        raise CheckpointError(
            f"{path} has {path.stat().st_size:,} bytes, at most {LONGEST_CONFIG:,} are read. Use the original file"
        )
    return read_json(path)


def architecture_of(raw: Mapping[str, Any], path: Path) -> Architecture:
    """Return what `raw`, which comes from `path`, describes."""
    try:
        return families.architecture_of(raw)
    except ConfigError as error:
        raise CheckpointError(f"{path} {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files with the weights: model.safetensors, or the shards that its index names."""
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _shards(index)
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run any code when it is read. Convert it: "
            "load it with transformers' AutoModelForCausalLM and use save_pretrained, which writes model.safetensors"
        )
    raise CheckpointError(
        f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json. "
        "Use a complete checkpoint, or --load-format dummy for random weights of this shape"
    )


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map. Use a complete checkpoint")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise CheckpointError(
                f"{index} names the shard {name!r}, which is not in {index.parent}. Use a complete checkpoint"
            )
    return [index.parent / name for name in names]


def folder_shapes(folder: Path, layout: Layout) -> Shapes:
    """Return plain name and shape of each weight in the checkpoint in `folder`, all of them floating-point numbers."""
    shapes: Shapes = {}
    for path in weight_files(folder):
        for name, stored_as, shape in safetensors_headers(path):
            if (plain := layout.plain_name(name)) is None:
                continue
            if stored_as not in FLOATS:
                raise CheckpointError(
                    f"{path} stores {name} as {stored_as}, which is not supported. "
                    f"Use a checkpoint in one of {', '.join(FLOATS)}"
                )
            shapes[plain] = shape
    return shapes


def safetensors_headers(path: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, number format and shape of each tensor that `path` stores."""
    try:
        with safe_open(path, framework="np") as file:  # numpy, because torch takes a second to import
            for name in file.keys():  # noqa: SIM118  a safetensors file is no dict
                tensor = file.get_slice(name)
                yield name, tensor.get_dtype(), tuple(tensor.get_shape())
    except (SafetensorError, OSError) as error:
        raise broken(path, error) from error


def broken(path: Path, reason: object) -> CheckpointError:
    """Return the refusal of a file that cannot be read or contradicts itself."""
    return CheckpointError(f"{path} is broken or truncated: {reason}. Use a complete file: copy or download it again")


def check_shapes(stored: Shapes, raw: Mapping[str, Any], layout: Layout, path: Path) -> None:
    """Raise CheckpointError, naming every missing, unexpected and mis-shaped tensor; `stored` has plain names."""
    problems = tensors.differences(stored, families.architecture_of(raw), layout)
    if problems:
        raise CheckpointError(
            f"the weights in {path} do not fit its config.json: {problems}. "
            "Use a complete checkpoint with its own config.json"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(
            f"{path} is invalid JSON: {reason}. Use the file that belongs to the checkpoint"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object. Use the checkpoint's own file")
    return content

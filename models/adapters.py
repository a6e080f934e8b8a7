"""LoRA adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

An adapter adds s B A x to what some linear layers make of x (Hu et al., 2021): A (r, in), B (out, r), s = lora_alpha / r,
or lora_alpha / sqrt(r) with rank-stabilized LoRA (Kalajdzievski, 2023). Names and shapes are compared with the model
before a number is read, so an adapter of another model is refused by the name of its tensor. Pickles are never read.

It must not know a single family, requests or HTTP.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from models import tensors
from models.architecture import Architecture
from models.family import Layout, shortened
from models.sources import checkpoint
from models.tensors import Piece

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MOST_RANK = 1024
PREFIX = "base_model.model."  # PEFT wraps the model twice
PAIR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# Settings of PEFT's LoraConfig that say how the adapter was made, or that the tensors show.
HARMLESS = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
})  # fmt: skip
PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")  # the others change the model's own weights, too


class AdapterError(checkpoint.CheckpointError):
    """The folder does not hold an adapter for this model; the message gives the reason and the remedy."""


class LowRank(NamedTuple):
    """What an adapter adds to the outputs from `start` on of the engine's matrix `part` in `layer`: b @ a @ x.

    a: (r, in). b: (out, r), the scale included. float32.
    """

    layer: int
    part: str
    start: int
    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class Adapter:
    """The low-rank products of one adapter. rank: the largest. digest: of all numbers, other for other numbers."""

    products: list[LowRank]
    rank: int
    digest: str
    modules: list[str] = field(default_factory=list)  # the names of the changed linear layers without their layer


@dataclass(frozen=True)
class Scales:
    """The rank and the scale that a config gives each module."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    stabilized: bool

    def of(self, module: str) -> tuple[int, float]:
        """Return rank and scale of a module by its whole name."""
        rank, alpha = _matched(self.ranks, module, self.rank), _matched(self.alphas, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.stabilized else rank)


def _matched(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first name in `pattern` that `module` ends with, as PEFT takes it."""
    found = (value for name, value in pattern.items() if module == name or module.endswith(f".{name}"))
    return next(found, default)


def load(folder: Path, config: Architecture, layout: Layout) -> Adapter:
    """Return the adapter in `folder` for a model of this architecture.

    Raises CheckpointError, naming the setting or the tensor at fault.
    """
    scales = read_config(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        if (folder / PICKLE).is_file():
            raise AdapterError(
                f"{folder} has its weights in {PICKLE}, a pickle, which can run any code when it is read. Convert it: load "
                "it with PEFT and use save_pretrained, which writes safetensors"
            )
        raise AdapterError(f"{folder} has no {WEIGHTS}. Use a folder that save_pretrained of a PEFT model wrote")
    mixed = (*tensors.EXPERT_PARTS, "router") if config.experts else ()
    found = tensors.pieces(config, layout).items()
    pieces = {name.removesuffix(".weight"): piece for name, piece in found if piece.place.part not in mixed}
    pairs = _pairs(path, pieces, layout, scales)
    products = [*_products(path, pairs, pieces, scales)]
    modules = {re.sub(r"^\w+\.\d+\.", "", plain) for plain in pairs}
    return Adapter(products, max(len(product.a) for product in products), _digest(products), sorted(modules))


def read_config(folder: Path) -> Scales:
    """Return what adapter_config.json in `folder` says; AdapterError for what the engine does not compute."""
    path = folder / CONFIG
    raw = checkpoint.read_config_file(path, "of a PEFT model")
    _refuse(raw, path)
    ranks = _pattern(raw, "rank_pattern", path, whole=True)
    alphas = _pattern(raw, "alpha_pattern", path, whole=False)
    rank, alpha = _number(raw.get("r", 8), "r", path, whole=True), _number(raw.get("lora_alpha", 8), "lora_alpha", path)
    return Scales(int(rank), alpha, {name: int(r) for name, r in ranks.items()}, alphas, bool(raw.get("use_rslora")))


def _refuse(raw: Mapping[str, Any], path: Path) -> None:
    """Raise AdapterError for a kind of adapter or a setting that would change the numbers and is not computed here."""
    if raw.get("peft_type") != "LORA":
        raise AdapterError(f"{path} has peft_type {shortened(raw.get('peft_type'))}. Use an adapter of the type LORA")
    if raw.get("bias") not in (None, False, "", "none"):
        raise AdapterError(
            f"{path} sets bias to {shortened(raw['bias'])}, which is not supported. Train it with bias none"
        )
    if not any(raw.get("init_lora_weights") is value or raw.get("init_lora_weights") == value for value in PLAIN_INITS):
        raise AdapterError(
            f"{path} sets init_lora_weights to {shortened(raw['init_lora_weights'])}, which changes the weights of the model. "
            "Save it as a plain adapter: save_pretrained with path_initial_model_for_weight_conversion"
        )
    for name, value in raw.items():
        if value and name not in HARMLESS:
            raise AdapterError(
                f"{path} sets {name} to {shortened(value)}, which is not supported. Use a plain LoRA adapter without it"
            )


def _pattern(raw: Mapping[str, Any], name: str, path: Path, whole: bool) -> dict[str, float]:
    """Return a rank_pattern or alpha_pattern. Its keys must be names: what PEFT takes as regular expressions is refused."""
    given = raw.get(name) or {}
    if not isinstance(given, dict):
        raise AdapterError(f"{path} sets {name} to {shortened(given)}. Use PEFT's own file")
    for key in given:
        if not re.fullmatch(r"[\w.]+", key):
            raise AdapterError(
                f"{path} has {shortened(key)} in {name}, a regular expression, which is not supported. "
                "Use the names of modules"
            )
    return {key: _number(value, f"{name} {key}", path, whole) for key, value in given.items()}


def _number(value: Any, name: str, path: Path, whole: bool = False) -> float:
    most = MOST_RANK if whole else 1e6
    types = int if whole else (int, float)
    if not isinstance(value, types) or isinstance(value, bool) or not 0 < value <= most:
        kind = "whole number" if whole else "number"
        raise AdapterError(f"{path} sets {name} to {shortened(value)}. Use a {kind} above 0 and at most {most:,.0f}")
    return float(value)


def _pairs(path: Path, pieces: Mapping[str, Piece], layout: Layout, scales: Scales) -> dict[str, dict[str, str]]:
    """Return by module, in plain names, the names of its A and B, whose shapes fit the model, and its whole name."""
    pairs: dict[str, dict[str, str]] = {}
    for name, stored_as, shape in checkpoint.safetensors_headers(path):
        found = PAIR.fullmatch(name.removeprefix(PREFIX))
        plain = layout.plain_name(found["module"]) if found else None
        piece = pieces.get(plain or "")
        if found is None or piece is None or piece.place.layer is None or len(piece.shape) != 2:
            raise AdapterError(
                f"{path} has the tensor {name}, which belongs to no linear layer of this model outside a mixture of "
                "experts. Use an adapter that was trained for it, of its linear layers alone"
            )
        if stored_as not in checkpoint.FLOATS:
            raise AdapterError(
                f"{path} stores {name} as {stored_as}. Use an adapter in one of {', '.join(checkpoint.FLOATS)}"
            )
        out, into = piece.shape[::-1] if piece.transposed else piece.shape
        rank, _ = scales.of(found["module"])
        expected = (rank, into) if found["side"] == "A" else (out, rank)
        if shape != expected:
            raise AdapterError(
                f"{path}: {name} is {list(shape)} but should be {list(expected)} for rank {rank} of this model. Use an adapter "
                f"that was trained for it, with its own {CONFIG}"
            )
        pair = pairs.setdefault(str(plain), {"module": found["module"]})
        if found["side"] in pair or pair["module"] != found["module"]:
            raise AdapterError(
                f"{path} has {name}, but {PREFIX}{pair['module']} is the same layer. Use an adapter with one of them"
            )
        pair[found["side"]] = name
    if not pairs:
        raise AdapterError(f"{path} has no tensors. Use a complete adapter")
    for pair in pairs.values():
        if len(pair) < 3:
            missing = f"{PREFIX}{pair['module']}.lora_{'B' if 'A' in pair else 'A'}.weight"
            raise AdapterError(f"{path} lacks the tensor {missing}. Use a complete adapter")
    return pairs


def _products(
    path: Path, pairs: dict[str, dict[str, str]], pieces: Mapping[str, Piece], scales: Scales
) -> Iterator[LowRank]:
    """Yield the products of all modules, the scale multiplied into B."""
    with safe_open(path, framework="pt") as file:
        for plain, pair in pairs.items():
            piece = pieces[plain]
            a, b = (file.get_tensor(pair[side]).float() for side in "AB")
            for name, tensor in ((pair["A"], a), (pair["B"], b)):
                if not torch.isfinite(tensor).all():
                    raise AdapterError(f"{path}: {name} holds NaN or infinity. Use an adapter whose training converged")
            assert piece.place.layer is not None
            b = b if piece.order is None else b[piece.order]
            yield LowRank(
                piece.place.layer, piece.place.part, piece.start, a, b * (scales.of(pair["module"])[1] * piece.scale)
            )


def _digest(products: list[LowRank]) -> str:
    """Return a hash of all places and numbers."""
    digest = hashlib.sha256()
    for product in sorted(products, key=lambda p: (p.layer, p.part, p.start)):
        digest.update(json.dumps([product.layer, product.part, product.start, *product.b.shape]).encode())
        for tensor in (product.a, product.b):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()

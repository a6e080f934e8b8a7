"""A folder with a GPT2LMHeadModel checkpoint: what its files say, before a weight is read.

Everything here reads JSON and safetensors headers with the standard library, so that a wrong folder
is refused at once, by name and with the remedy. It must not import torch; `models/weights.py` reads the
tensors.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# GPT2Config's own defaults, by which transformers reads a config.json that leaves something out.
DEFAULTS: dict[str, Any] = {
    "block_size": 1024,
    "vocab_size": 50257,
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "n_inner": None,
    "activation": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}
# Names that config.json has for a setting of ours; the first that is there counts.
ALIASES = {
    "block_size": ("n_positions", "max_position_embeddings", "n_ctx"),
    "n_layer": ("n_layer", "num_hidden_layers"),
    "n_head": ("n_head", "num_attention_heads"),
    "n_embd": ("n_embd", "hidden_size"),
    "activation": ("activation_function",),
}
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
# model.py's ACTIVATIONS, which cannot be asked without torch; a test holds the two together.
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu", "swish", "tanh")
UNSUPPORTED = ("add_cross_attention", "quantization_config", "pruned_heads", "rope_scaling")

IGNORED = re.compile(r"h\.\d+\.attn\.(masked_)?bias$")  # causal masks stored by old versions
FLOATS = ("F64", "F32", "F16", "BF16")

Shapes = Mapping[str, tuple[int, ...]]


class CheckpointError(ValueError):
    """A folder is not a GPT-2 checkpoint that can be served; the text says why and what to do."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return the shape of the checkpoint in `folder` in GPTConfig's names."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no config.json. Use a folder that save_pretrained of a GPT2LMHeadModel wrote"
        )
    raw = _read_json(path)
    kind = raw.get("model_type", "gpt2")
    if kind != "gpt2":
        raise CheckpointError(f"{path} has model_type {kind!r}, but only 'gpt2' is supported. Use a GPT-2 checkpoint")
    for key in UNSUPPORTED:
        if raw.get(key):
            raise CheckpointError(
                f"{path} sets {key}, which changes the computation and is not supported. Use a checkpoint without it"
            )
    config = dict(DEFAULTS)
    for name in DEFAULTS:
        for key in ALIASES.get(name, (name,)):
            if key in raw:
                config[name] = raw[key]
                break
    _check_values(config, path)
    return config


def _check_values(config: Mapping[str, Any], path: Path) -> None:
    for name in (*SIZES, "n_inner"):
        value = config[name]
        if name == "n_inner" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(
                f"{path} sets {ALIASES.get(name, (name,))[0]} to {value!r}. Use a whole number above 0"
            )
    if config["n_embd"] % config["n_head"]:
        raise CheckpointError(
            f"{path} has n_embd {config['n_embd']}, which is not a multiple of n_head "
            f"{config['n_head']}. Use the config.json that belongs to the weights"
        )
    if config["activation"] not in ACTIVATIONS:
        raise CheckpointError(
            f"{path} sets activation_function {config['activation']!r}, which is not supported. "
            f"Use a checkpoint with one of {', '.join(ACTIVATIONS)}"
        )
    epsilon = config["layer_norm_epsilon"]
    if not isinstance(epsilon, (int, float)) or not 0 < epsilon < 1:
        raise CheckpointError(f"{path} sets layer_norm_epsilon to {epsilon!r}. Use a number between 0 and 1")
    for name in ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "tie_word_embeddings"):
        if not isinstance(config[name], bool):
            raise CheckpointError(f"{path} sets {name} to {config[name]!r}. Use true or false")


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights, safetensors before pytorch_model.bin."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        suffix = Path(name).suffix
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            return _shards(index)
        loose = sorted(folder.glob(f"*{suffix}")) if suffix == ".safetensors" else []
        if loose:
            return loose
    raise CheckpointError(
        f"{folder} has no weights: neither *.safetensors nor pytorch_model.bin. "
        "Use a complete checkpoint, or --load-format dummy for random weights of this shape"
    )


def _shards(index: Path) -> list[Path]:
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} has no weight_map. Use a complete checkpoint")
    names = sorted({str(name) for name in places.values()})
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise CheckpointError(
                f"{index} names the shard {name!r}, which is not in {index.parent}. Use a complete checkpoint"
            )
    return [index.parent / name for name in names]


def safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each tensor in `path`, read from its header."""
    broken = f"{path} is broken or truncated: {{}}. Use a complete file: copy or download it again"
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 < length <= size - 8:
            raise CheckpointError(broken.format(f"{size:,} bytes are too few for a safetensors header"))
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {
                name: (str(entry["dtype"]), tuple(entry["shape"]), int(entry["data_offsets"][1]))
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(broken.format("its header is invalid")) from error
    needed = 8 + length + max((end for _, _, end in tensors.values()), default=0)
    if needed != size:
        raise CheckpointError(broken.format(f"it has {size:,} bytes but should have {needed:,}"))
    for name, (dtype, _, _) in tensors.items():
        if dtype not in FLOATS and not IGNORED.search(name):
            raise CheckpointError(
                f"{path} stores {name} as {dtype}, which is not supported. "
                f"Use a checkpoint in one of {', '.join(FLOATS)}"
            )
    return {name: shape for name, (_, shape, _) in tensors.items()}


def plain_name(name: str) -> str | None:
    """Return the name of a stored tensor without its prefix, or None for a buffer to ignore."""
    name = name.removeprefix("transformer.")
    return None if IGNORED.match(name) else name


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of all tensors of a checkpoint of this shape, weights (in, out)."""
    C, inner = config["n_embd"], config["n_inner"] or 4 * config["n_embd"]
    norm = {"weight": (C,), "bias": (C,)}
    block = {
        "ln_1": norm,
        "attn.c_attn": {"weight": (C, 3 * C), "bias": (3 * C,)},
        "attn.c_proj": {"weight": (C, C), "bias": (C,)},
        "ln_2": norm,
        "mlp.c_fc": {"weight": (C, inner), "bias": (inner,)},
        "mlp.c_proj": {"weight": (inner, C), "bias": (C,)},
    }
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (config["vocab_size"], C),
        "wpe.weight": (config["block_size"], C),
    }
    for layer in range(config["n_layer"]):
        for part, tensors in block.items():
            shapes |= {f"h.{layer}.{part}.{leaf}": shape for leaf, shape in tensors.items()}
    shapes |= {f"ln_f.{leaf}": shape for leaf, shape in norm.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], C)
    return shapes


def check_shapes(found: Shapes, config: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError, naming every missing, unexpected and mis-shaped tensor.

    `found` has plain names. A tied model may store `lm_head.weight` as well, or in the place of
    `wte.weight`.
    """
    expected = expected_shapes(config)
    if config["tie_word_embeddings"] and "lm_head.weight" in found:
        expected["lm_head.weight"] = expected["wte.weight"]
        if "wte.weight" not in found:
            del expected["wte.weight"]
    problems = []
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    if missing:
        problems.append(f"missing {_grouped(missing)}")
    if unexpected:
        problems.append(f"unexpected {_grouped(unexpected)}")
    odd: dict[str, list[str]] = defaultdict(list)
    for name, shape in expected.items():
        if name in found and tuple(found[name]) != shape:
            odd[f"is {list(found[name])} but should be {list(shape)}"].append(name)
    problems += [f"{_grouped(names)} {what}" for what, names in odd.items()]
    if problems:
        raise CheckpointError(
            f"the weights in {folder} do not fit its config.json: {'; '.join(problems)}. "
            "Use a complete GPT2LMHeadModel checkpoint with its own config.json"
        )


def parameters(config: Mapping[str, Any]) -> int:
    """Return the number of parameters of a model of this shape."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


def _grouped(names: list[str]) -> str:
    """Name all `names` in one line: h.0.ln_1.bias and h.1.ln_1.bias become h.{0,1}.ln_1.bias."""
    layers: dict[str, list[str]] = defaultdict(list)
    for name in names:
        match = re.match(r"h\.(\d+)\.(.+)", name)
        layers[f"h.{{}}.{match[2]}" if match else name].append(match[1] if match else "")
    return ", ".join(
        (form.format(numbers[0]) if len(numbers) == 1 else form.format(f"{{{','.join(numbers)}}}"))
        if numbers[0]
        else form
        for form, numbers in layers.items()
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is invalid JSON: {error}. Use the file that belongs to the checkpoint"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object. Use the checkpoint's own file")
    return content

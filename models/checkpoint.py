"""A folder with a GPT2LMHeadModel checkpoint: its shape and its files, checked before a weight is read.

It reads JSON and safetensors headers only, so that a wrong folder is refused at once, by name and with the remedy. It
must not import torch; `models/weights.py` reads the tensors.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

# GPT2Config's own defaults, which transformers takes for what config.json leaves out.
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
# Names in config.json for a setting of ours; the first one present counts.
ALIASES = {
    "block_size": ("n_positions", "max_position_embeddings", "n_ctx"),
    "n_layer": ("n_layer", "num_hidden_layers"),
    "n_head": ("n_head", "num_attention_heads"),
    "n_embd": ("n_embd", "hidden_size"),
    "activation": ("activation_function",),
}
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
# Those of models/gpt2.py, which cannot be imported without torch; a test compares the two.
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu", "swish", "tanh")
UNSUPPORTED = ("add_cross_attention", "quantization_config", "pruned_heads", "rope_scaling")

IGNORED = re.compile(r"h\.\d+\.attn\.(masked_)?bias$")  # causal masks stored by old versions
FLOATS = ("F64", "F32", "F16", "BF16")

Shapes = dict[str, tuple[int, ...]]


class CheckpointError(ValueError):
    """A folder does not hold a GPT-2 checkpoint that can be served; the message gives the reason and the remedy."""


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
            "load it with transformers' GPT2LMHeadModel and use save_pretrained, which writes model.safetensors"
        )
    raise CheckpointError(
        f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json. "
        "Use a complete checkpoint, or --load-format dummy for random weights of this shape"
    )


def _shards(index: Path) -> list[Path]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map. Use a complete checkpoint")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise CheckpointError(
                f"{index} names the shard {name!r}, which is not in {index.parent}. Use a complete checkpoint"
            )
    return [index.parent / name for name in names]


def safetensors_shapes(path: Path) -> Shapes:
    """Return stored name and shape of each weight in `path`, without the causal masks of old versions."""
    shapes: Shapes = {}
    try:
        with safe_open(path, framework="np") as file:  # numpy, because torch takes a second to import
            for name in file.keys():  # noqa: SIM118  a safetensors file is no dict
                tensor = file.get_slice(name)
                if IGNORED.search(name):
                    continue
                if tensor.get_dtype() not in FLOATS:
                    raise CheckpointError(
                        f"{path} stores {name} as {tensor.get_dtype()}, which is not supported. "
                        f"Use a checkpoint in one of {', '.join(FLOATS)}"
                    )
                shapes[name] = tuple(tensor.get_shape())
    except (SafetensorError, OSError) as error:
        raise broken(path, error) from error
    return shapes


def broken(path: Path, error: Exception) -> CheckpointError:
    """Return the refusal of a file that safetensors cannot read."""
    return CheckpointError(f"{path} is broken or truncated: {error}. Use a complete file: copy or download it again")


def plain_name(name: str) -> str:
    """Return the name of a stored tensor without its prefix."""
    return name.removeprefix("transformer.")


def expected_shapes(config: Mapping[str, Any]) -> Shapes:
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
    shapes: Shapes = {"wte.weight": (config["vocab_size"], C), "wpe.weight": (config["block_size"], C)}
    for layer in range(config["n_layer"]):
        for part, tensors in block.items():
            shapes |= {f"h.{layer}.{part}.{leaf}": shape for leaf, shape in tensors.items()}
    shapes |= {f"ln_f.{leaf}": shape for leaf, shape in norm.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], C)
    return shapes


def check_shapes(stored: Shapes, config: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError, naming every missing, unexpected and mis-shaped tensor.

    A tied model may also store `lm_head.weight`, or store it in place of `wte.weight`.
    """
    stored = {plain_name(name): shape for name, shape in stored.items()}
    expected = expected_shapes(config)
    if config["tie_word_embeddings"] and "lm_head.weight" in stored:
        expected["lm_head.weight"] = expected["wte.weight"]
        if "wte.weight" not in stored:
            del expected["wte.weight"]
    problems = []
    missing = [name for name in expected if name not in stored]
    unexpected = [name for name in stored if name not in expected]
    if missing:
        problems.append(f"missing {_grouped(missing)}")
    if unexpected:
        problems.append(f"unexpected {_grouped(unexpected)}")
    wrong: dict[str, list[str]] = defaultdict(list)
    for name, shape in expected.items():
        if name in stored and stored[name] != shape:
            wrong[f"is {list(stored[name])} but should be {list(shape)}"].append(name)
    problems += [f"{_grouped(names)} {difference}" for difference, names in wrong.items()]
    if problems:
        raise CheckpointError(
            f"the weights in {folder} do not fit its config.json: {'; '.join(problems)}. "
            "Use a complete GPT2LMHeadModel checkpoint with its own config.json"
        )


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

"""What one file in `models/families/` gives: how its config.json is read, and how its checkpoints name tensors.

It must not import torch, nor know a single family.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from models.architecture import Architecture, Llama3Scaling, LongRope, Rope

MOST = 2**24  # of any size: contexts, vocabularies, widths
MOST_LAYERS = 1024
# Those of models/activations.py, which cannot be imported without torch; a test compares the two.
ACTIVATIONS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu", "relu", "silu", "swish", "tanh")

# Keys of any config.json that do not change what a forward pass computes.
HARMLESS = frozenset({
    "architectures", "attention_dropout", "attn_pdrop", "auto_map", "classifier_dropout",
    "bos_token_id", "decoder_start_token_id", "dtype", "embd_pdrop", "eos_token_id", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "hidden_dropout", "id2label", "initializer_range", "is_decoder",
    "is_llama_config", "keys_to_ignore_at_inference", "label2id", "max_sequence_length", "max_window_layers",
    "model_type", "output_attentions", "output_hidden_states", "output_past", "pad_token_id", "prefix",
    "problem_type", "reorder_and_upcast_attn", "resid_pdrop", "return_dict", "sep_token_id", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
    "tokenizer_class", "torch_dtype", "transformers.js_config", "transformers_version", "unk_token_id",
    "unsloth_fixed", "unsloth_version", "use_cache",
    # Of generate(), which older versions wrote here.
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "length_penalty", "max_length", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature",
    "top_k", "top_p", "typical_p",
})  # fmt: skip
# Switches that change nothing as long as they have this value.
NEUTRAL: Mapping[str, Any] = {
    "decoder_sparse_step": 1,
    "embedding_multiplier": 1.0,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "logits_scaling": 1.0,
    "pretraining_tp": 1,
    "residual_multiplier": 1.0,
    "use_bfloat16": True,
}


class ConfigError(ValueError):
    """A config.json describes a model that cannot be served; the message goes on after the file's name."""


class Config:
    """A config.json, from which a family takes key by key. What is left may change the computation."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self._taken: set[str] = set()

    def assume(self, **defaults: Any) -> None:
        """Let these values stand for keys that are missing or null."""
        given = {key: value for key, value in self.raw.items() if value is not None or key not in defaults}
        self.raw = {**defaults, **given}

    def take(self, *keys: str, default: Any = None) -> Any:
        """Return the value of the first of `keys` that is present and not null."""
        self._taken.update(keys)
        return next((self.raw[key] for key in keys if self.raw.get(key) is not None), default)

    def size(self, *keys: str, default: int | None = None, most: int = MOST) -> int:
        """Return a whole number from 1 to `most`."""
        value = self.take(*keys, default=default)
        if value is None:
            raise ConfigError(f"has no {keys[0]}. Use the config.json that belongs to the weights")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ConfigError(f"sets {self.name(*keys)} to {value!r}. Use a whole number from 1 to {most:,}")
        return value

    def number(self, key: str, default: float, below: float = float("inf")) -> float:
        """Return a number above 0 and below `below`."""
        return positive(key, self.take(key, default=default), below)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.take(key, default=default)
        if not isinstance(value, bool):
            raise ConfigError(f"sets {key} to {value!r}. Use true or false")
        return value

    def activation(self, key: str, default: str) -> str:
        """Return the name of an activation."""
        value = self.take(key, default=default)
        if value not in ACTIVATIONS:
            raise ConfigError(
                f"sets {key} to {value!r}, which is not supported. Use a model with one of {', '.join(ACTIVATIONS)}"
            )
        return str(value)

    def rope(self) -> Rope:
        """Return the rotation, which transformers keeps in `rope_parameters` since version 5."""
        theta, scaling, new = (self.take(key) for key in ("rope_theta", "rope_scaling", "rope_parameters"))
        for key, value in (("rope_scaling", scaling), ("rope_parameters", new)):
            if value is not None and not isinstance(value, dict):
                raise ConfigError(f"sets {key} to {value!r}. Use the config.json that belongs to the weights")
        part, original = (self.take(key) for key in ("partial_rotary_factor", "original_max_position_embeddings"))
        before = {"rope_theta": 10_000.0 if theta is None else theta, "partial_rotary_factor": part}
        given = {**before, "original_max_position_embeddings": original, **(scaling or {}), **(new or {})}
        return _rope(given, self.take("max_position_embeddings"))

    def refuse_rest(self) -> None:
        """Raise ConfigError for a switch that is on and was not taken: ignored, it would change every answer."""
        for key, value in self.raw.items():
            if key in self._taken or key in HARMLESS or key.startswith("_"):  # transformers' own notes begin so
                continue
            if value and not (key in NEUTRAL and value == NEUTRAL[key]):
                raise ConfigError(
                    f"sets {key} to {shortened(value)}, which may change the computation and is not supported. "
                    "Use a model without it"
                )

    def name(self, *keys: str) -> str:
        """Return the first of `keys` that is present, or the first of all."""
        return next((key for key in keys if self.raw.get(key) is not None), keys[0])


def positive(key: str, value: Any, below: float = float("inf")) -> float:
    """Return `value` as a float above 0 and below `below`. Raises ConfigError."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < below:
        most = f" and below {below:g}" if below < float("inf") else ""
        raise ConfigError(f"sets {key} to {shortened(value)}. Use a number above 0{most}")
    return float(value)


def shortened(value: Any) -> str:
    """Return a value of a config.json for a message of one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _rope(given: dict[str, Any], context: Any) -> Rope:
    """Return the rotation that the merged parameters describe; llama3, linear and longrope are the scalings we have."""
    kinds = (given.pop("rope_type", None), given.pop("type", None))  # "type" is the older name
    kind = next((kind for kind in kinds if kind is not None), "default")
    theta = positive("rope_theta", given.pop("rope_theta"))
    part = given.pop("partial_rotary_factor", None)
    part = positive("partial_rotary_factor", 1.0 if part is None else part, below=1.0001)
    rope = Rope(theta, part=part)
    if kind == "linear":
        rope = replace(rope, factor=positive("the factor of rope_scaling", given.pop("factor", None)))
    elif kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        factor, low, high, context = (positive(f"{name} of rope_scaling", given.pop(name, None)) for name in names)
        if low >= high:
            raise ConfigError(
                f"sets low_freq_factor to {low}, but high_freq_factor to {high}. Use a low one below the high one"
            )
        rope = replace(rope, llama3=Llama3Scaling(factor, low, high, int(context)))
    elif kind in ("longrope", "su"):
        rope = replace(rope, longrope=_longrope(given, context))
    elif kind != "default":
        raise ConfigError(
            f"sets rope_scaling to the type {shortened(kind)}, which is not supported. "
            "Use a model with default, linear, llama3 or longrope"
        )
    # What is unread changes the angles, but for the numbers of a scaling that is not in use.
    unread = [k for k, value in given.items() if value and (kind != "default" or isinstance(value, (dict, list)))]
    if unread:
        raise ConfigError(f"sets {unread[0]} of rope_scaling, which is not supported. Use a model without it")
    return rope


def _longrope(given: dict[str, Any], context: Any) -> LongRope:
    original = positive("original_max_position_embeddings", given.pop("original_max_position_embeddings", None))
    factor = positive("the factor of rope_scaling", given.pop("factor", None) or context / original)
    stretch = given.pop("attention_factor", None) or math.sqrt(1 + math.log(max(factor, 1)) / math.log(original))
    lists = [(name, given.pop(name, None)) for name in ("short_factor", "long_factor")]
    short, long = (tuple(positive(name, x) for x in (xs if isinstance(xs, list) else ())) for name, xs in lists)
    return LongRope(short, long, int(original), positive("attention_factor", stretch))


@dataclass(frozen=True)
class Layout:
    """How a family's checkpoints name their tensors, without the leaf .weight or .bias.

    parts: for each field of `models.network.Block`, the modules whose rows are stacked in it; {} is the number of an expert.
    prefix: what all names but the head's begin with, or may lack.
    layer: the form of a block's name.
    transposed: linear layers are stored (in, out).
    renamed: other names of parts.
    ignored: names of stored tensors that carry no weights.
    by_kv_head: queries, keys and values are one tensor, in which a head of keys lies behind the queries that share it.
    interleaved: in heads of queries and keys, the two dimensions that rotate together are neighbors.
    norm_offset: added to the weights of norms when they are loaded.
    """

    prefix: str
    embedding: str
    norm: str
    layer: str
    parts: Mapping[str, tuple[str, ...]]
    positions: str | None = None
    embedding_norm: str = "word_embeddings_layernorm"
    head: str = "lm_head"
    transposed: bool = False
    ignored: re.Pattern[str] | None = None
    by_kv_head: bool = False
    interleaved: bool = False
    norm_offset: float = 0.0
    renamed: Mapping[str, str] = field(default_factory=dict)

    def plain_name(self, name: str) -> str | None:
        """Return the name of a stored tensor without its prefix, None for one that carries no weights."""
        if self.ignored is not None and self.ignored.search(name):
            return None
        for other, part in self.renamed.items():
            name = name.replace(f".{other}.", f".{part}.")
        return name.removeprefix(self.prefix)


# The names in GGUF files, whose converter stores gates, experts, queries, keys and values in the order of the engine.
SEPARATE = Layout(
    prefix="", embedding="token_embd", positions="position_embd", embedding_norm="token_embd_norm", norm="output_norm",
    head="output", layer="blk.{}.",
    parts={
        "norm_1": ("attn_norm",), "norm_2": ("ffn_norm",), "attn_norm": ("post_attention_norm",),
        "mlp_norm": ("post_ffw_norm",), "q_norm": ("attn_q_norm",), "k_norm": ("attn_k_norm",),
        "qkv": ("attn_q", "attn_k", "attn_v"), "attn_proj": ("attn_output",), "fc": ("ffn_gate", "ffn_up"),
        "mlp_proj": ("ffn_down",), "router": ("ffn_gate_inp",),
    },
    ignored=re.compile(r"^rope_(freqs|factors_(long|short))\.weight$"),  # which are read with the metadata
)  # fmt: skip
FUSED = replace(SEPARATE, parts={**SEPARATE.parts, "qkv": ("attn_qkv",), "fc": ("ffn_up",)})
MIXTURE = {"fc": ("ffn_gate_exps.{}", "ffn_up_exps.{}"), "mlp_proj": ("ffn_down_exps.{}",)}
# Keys of config.json, and those of GGUF files behind the architecture's name.
SIZES = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}  # fmt: skip
KEYS = {**SIZES, "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base"}


@dataclass(frozen=True)
class GGUF:
    """How GGUF files hold a family's models.

    architecture: the value of `general.architecture`. model_type: that of config.json.
    needs: a key or a tensor that a file must have; those of the same architecture without it have another form.
    keys: which of the file's keys, behind the architecture's name, have the values of which keys of config.json.
    fixed: what the file may not say. derived: what follows from the other values.
    """

    architecture: str
    model_type: str
    layout: Layout = SEPARATE
    keys: Mapping[str, str] = field(default_factory=lambda: KEYS)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: {}
    needs: str = ""


@dataclass(frozen=True)
class Family:
    """model_types: the values of `model_type` in config.json that `read` understands.

    gguf: the forms of its GGUF files.
    shares_tokenizer: all published models have the same tokenizer, so that a checkpoint may lack its files.
    """

    model_types: tuple[str, ...]
    read: Callable[[Config], Architecture]
    layout: Layout
    gguf: tuple[GGUF, ...] = ()
    shares_tokenizer: bool = False

"""A model that we serve, written for its peers: a folder as transformers stores it, with a tokenizer of its own.

It must not know a single peer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models import families, tensors, weights
from models.gguf import gguf_reader
from models.network import Network
from models.sources.catalog import ResolvedModel
from models.sources.hub import FILES
from models.text import ranks, splits
from models.text.ranks import ALPHABET, EOT, TokenizerError
from models.text.splits import Split

GPT2_DEFAULTS = {  # llama.cpp's converter needs them spelled out
    "vocab_size": 50257, "n_positions": 1024, "n_ctx": 1024, "layer_norm_epsilon": 1e-5, "bos_token_id": 50256,
    "eos_token_id": 50256,
}  # fmt: skip
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # fmt: skip
ADDED = {2: True, 3: True, 4: False}  # tokenizer.ggml.token_type of tokens beside the merges: whether it is special
Added = Mapping[int, tuple[str, bool]]  # by id: a token that is found whole, and whether it is special


def write_folder(resolved: ResolvedModel, folder: Path) -> Path:
    """Write config.json, model.safetensors in bfloat16 and tokenizer.json into `folder`, and return it.

    Nothing is written when the weights are there, which come last. Raises TokenizerError where GPT-2's ranks are needed
    and are not on this machine.
    """
    file = folder / "model.safetensors"
    if file.is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(resolved)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(resolved, folder)
    part = folder / "model.part"
    stored = {name: tensor.contiguous() for name, tensor in stored_tensors(resolved)}
    save_file(stored, str(part), metadata={"format": "pt"})
    part.replace(file)
    return folder


def _config(resolved: ResolvedModel) -> dict[str, Any]:
    kind = str(resolved.config["model_type"])
    defaults = GPT2_DEFAULTS if kind == "gpt2" else {}
    return {**defaults, **resolved.config, "architectures": [CLASSES.get(kind, "")], "dtype": "bfloat16"}


def stored_tensors(resolved: ResolvedModel, dtype: str = "bfloat16") -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of each tensor of a checkpoint."""
    layout = families.family_of(resolved.config).layout
    network = weights.load(resolved, dtype)
    for name, piece in tensors.pieces(network.config, layout).items():
        whole = _tensor(network, piece.place)
        rows = piece.shape[-1] if piece.transposed else piece.shape[0]
        values = (whole[piece.start : piece.start + rows] - piece.offset) / piece.scale
        if piece.order is not None:
            values = values[torch.tensor(piece.order).argsort()]
        full = name if name.startswith(layout.head) else layout.prefix + name
        yield full, values.T if piece.transposed else values


def _tensor(network: Network, place: tensors.Place) -> Tensor:
    owner: Any = network if place.layer is None else network.blocks[place.layer]
    part = getattr(owner, place.part)
    found = part if isinstance(part, Tensor) else getattr(part, place.leaf)
    assert isinstance(found, Tensor)
    return found


def _write_tokenizer(resolved: ResolvedModel, folder: Path) -> None:
    source = resolved.tokenizer
    if source is not None and source.is_dir():
        for name in (name for name in FILES if name != "config.json" and (source / name).is_file()):
            shutil.copyfile(source / name, folder / name)
        return
    content, names = _of_ranks() if source is None else _of_gguf(source)
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    # AutoTokenizer takes this class as it is; for any other it would guess how a text is split.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _of_gguf(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return tokenizer.json and the names of special tokens. TokenizerError unless it is a known byte-level BPE."""
    metadata = gguf_reader.read(file).metadata
    split = splits.GGUF.get(str(metadata.get("tokenizer.ggml.pre")))
    if metadata.get("tokenizer.ggml.model") != "gpt2" or split is None:
        raise TokenizerError(f"the tokenizer of {file.name} cannot be written as tokenizer.json. Set --folder")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    added = {i: (token, ADDED[kind]) for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind in ADDED}
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    names = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    return _tokenizer(vocabulary, merges, added, split), names


def _of_ranks() -> tuple[dict[str, Any], dict[str, str]]:
    """Return the same for GPT-2's ranks: a token was merged from the parts that the merges before it leave."""
    path = os.environ.get("EB_TOKENIZER_FILE")
    encoding = ranks.from_file(Path(path)) if path else ranks.from_tiktoken()
    end = encoding.encode_single_token(EOT)
    table = {encoding.decode_single_token_bytes(i): i for i in range(end)}
    letters = {byte: character for character, byte in ALPHABET.items()}

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, rank in table.items():
        if len(token) > 1:
            left, right = _parts(token, table, rank)
            merges.append((written(left), written(right)))
    vocabulary = {written(token): i for token, i in table.items()} | {EOT: end}
    return _tokenizer(vocabulary, merges, {end: (EOT, True)}, splits.GPT2), {"bos_token": EOT, "eos_token": EOT}


def _parts(token: bytes, table: Mapping[bytes, int], below: int) -> list[bytes]:
    """Return what is left of a token after all merges whose rank is below its own: two parts."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        rank, i = min((table.get(a + b, below), i) for i, (a, b) in enumerate(pairwise(parts)))
        if rank >= below:
            raise TokenizerError(f"the ranks have no merges that make token {below}. Use those of GPT-2")
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _tokenizer(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, ...]], added: Added, split: Split
) -> dict[str, Any]:
    """Return the content of a tokenizer.json of byte-level BPE."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    before: dict[str, Any] | None = None
    if split is splits.SMOLLM:
        before = {"type": "Digits", "individual_digits": True}
    elif split.originals:
        before = {"type": "Split", "pattern": {"Regex": split.originals[0]}, "behavior": "Isolated", "invert": False}
    level = {**bytes_alone, "use_regex": not split.originals}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": text, "special": special, **flags} for i, (text, special) in added.items()],
        "normalizer": {"type": "NFC"} if split.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [before, level]} if before else level,
        "post_processor": None, "decoder": bytes_alone,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocabulary, "merges": merges,
        },
    }  # fmt: skip

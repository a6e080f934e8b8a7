"""The tokenizer in a GGUF file's metadata: byte-level BPE with a named split, or SentencePiece's BPE.

It gets the metadata as a mapping, and must not know how a file is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from models.text import splits, vocabulary
from models.text.ranks import TokenizerError
from models.text.vocabulary import Vocabulary

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
MOST_CUTS = 1 << 30  # characters that are copied while merges are made of scores; hundreds of times those of Llama 2
# A GGUF file has room for one end-of-text id, but models end an answer with any of these.
ENDINGS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
)
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ANOTHER = "Use a file whose tokenizer.ggml.model is gpt2 or llama, or the model's folder with tokenizer.json"


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a file with their ids: all, the control tokens, and those found whole in any text."""

    source: str
    ids: Mapping[str, int]
    control: Mapping[str, int]
    others: Mapping[str, int]


def from_gguf(metadata: Mapping[str, Any], source: str = "the GGUF file") -> Vocabulary:
    """Return the tokenizer of GGUF metadata. Raises TokenizerError for an unknown kind or inconsistent metadata."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not _is_list(tokens, str) or not tokens:
        raise TokenizerError(f"{source} has no tokenizer.ggml.tokens. {_ANOTHER}")
    if len(set(tokens)) != len(tokens) or len(tokens) > vocabulary.MOST_IDS:
        raise TokenizerError(f"tokenizer.ggml.tokens in {source} has a token twice, or too many. {_ANOTHER}")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not _is_list(types, int) or len(types) != len(tokens):
        raise TokenizerError(f"tokenizer.ggml.token_type in {source} does not fit its tokens. {_ANOTHER}")
    ids = {token: i for i, token in enumerate(tokens)}
    control = {token: i for (token, i), kind in zip(ids.items(), types) if kind in (UNKNOWN, CONTROL)}
    others = {token: i for (token, i), kind in zip(ids.items(), types) if kind == USER_DEFINED}
    found = _Tokens(source, ids, control, others)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        fields = _byte_level(metadata, found)
    elif kind == "llama":
        fields = _sentencepiece(metadata, found)
    else:
        raise TokenizerError(f"{source} has the tokenizer {str(kind)[:60]!r}, which is not supported. {_ANOTHER}")
    named = {name: _id(metadata, f"{key}_token_id", len(tokens)) for name, key in _NAMED.items()}
    ends = [named["eos_token"], *(_id(metadata, f"{key}_token_id", len(tokens)) for key in ("eot", "eom"))]
    ends += [control.get(text) for text in ENDINGS]
    eos_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
    if not eos_ids:
        raise TokenizerError(f"{source} has no tokenizer.ggml.eos_token_id. {_ANOTHER}")
    bos, template = named["bos_token"], metadata.get("tokenizer.chat_template")
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", fields.pop("adds_bos", True))
    return Vocabulary(
        **fields,
        control=control,
        eos_ids=eos_ids,
        bos_ids=(bos,) if adds_bos and bos is not None else (),
        template=template if isinstance(template, str) else None,
        names={name: tokens[i] for name, i in named.items() if i is not None},
    )


def _byte_level(metadata: Mapping[str, Any], tokens: _Tokens) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre")
    split = splits.GGUF.get(str(pre))
    if split is None:
        raise TokenizerError(
            f"{tokens.source} has the pre-tokenizer {str(pre)[:60]!r}, which is not supported. Known are "
            f"{', '.join(splits.GGUF)}. Use the model's folder with tokenizer.json"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not _is_list(merges, str):
        raise TokenizerError(f"{tokens.source} has no tokenizer.ggml.merges. {_ANOTHER}")
    pairs = [tuple(pair.split(" ")) for pair in merges]
    encode, pieces = vocabulary.byte_level(tokens.source, tokens.ids, pairs, split, tokens.control, tokens.others)
    return {"encode": encode, "pieces": pieces, "adds_bos": split is splits.LLAMA3}


def _sentencepiece(metadata: Mapping[str, Any], tokens: _Tokens) -> dict[str, Any]:
    """Build the tokenizer as transformers does for a GGUF file."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    from models.text import general_bpe

    merges = metadata.get("tokenizer.ggml.merges")
    if _is_list(merges, str):
        pairs = [tuple(pair.split(" ")) for pair in merges]
    else:
        scores = metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, list | tuple) or len(scores) != len(tokens.ids):
            raise TokenizerError(
                f"{tokens.source} has neither tokenizer.ggml.merges nor scores that fit its tokens. {_ANOTHER}"
            )
        if sum(len(token) ** 2 for token in tokens.ids) > MOST_CUTS:
            raise TokenizerError(f"tokenizer.ggml.tokens in {tokens.source} has too many long tokens. {_ANOTHER}")
        pairs = merges_of_scores(tokens.ids, [float(score) for score in scores])
    try:
        tokenizer = Tokenizer(BPE(dict(tokens.ids), pairs, fuse_unk=True, byte_fallback=True))
    except Exception as error:  # the library raises bare Exceptions
        raise TokenizerError(
            f"the tokenizer in {tokens.source} is not consistent: {str(error)[:200]}. {_ANOTHER}"
        ) from error
    space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(general_bpe.SPACE, "first" if space else "never", split=False)
    strip = [decoders.Strip(" ", 1, 0)] if space else []
    replace = decoders.Replace(general_bpe.SPACE, " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), *strip])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in tokens.control])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in tokens.others])
    encode, encode_rest = general_bpe.encoders(tokenizer, tokens.source)
    pieces, leading_space = general_bpe.pieces(tokenizer, tokens.source, len(tokens.ids))
    return {"encode": encode, "encode_rest": encode_rest, "pieces": pieces, "leading_space": leading_space}


def merges_of_scores(ids: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return the merges that a SentencePiece vocabulary implies: every split of each token, the best token first."""
    found = []
    for (token, _), score in zip(ids.items(), scores):
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(score, len(left), len(right), left, right) for left, right in known]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    return value if type(value) is int and 0 <= value < size else None


def _is_list(value: Any, kind: type) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple) and all(isinstance(item, kind) for item in value)

"""A model folder's tokenizer: tokenizer.json or vocab.json with merges.txt, and the files that name special tokens.

It must not import the `tokenizers` library unless a folder needs it: most do not, and the import takes time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from models.text import splits, vocabulary
from models.text.ranks import EOT, OutOfOrder, TokenizerError
from models.text.splits import Split
from models.text.vocabulary import Vocabulary

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LONGEST_FILE = 256 << 20  # bytes
_FILES = "Use a folder with the model's tokenizer files"


def from_folder(folder: Path) -> Vocabulary:
    """Read a folder's tokenizer. Raises TokenizerError if a file is missing or broken, or files contradict each other."""
    config = _optional(folder, "tokenizer_config.json")
    names = _names({**_optional(folder, "special_tokens_map.json"), **config})
    if (folder / "tokenizer.json").is_file():
        fields = _fast(folder, config, names)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        fields = _vocab_and_merges(folder, config, names)
    else:
        model = " (tokenizer.model alone cannot be read)" if (folder / "tokenizer.model").is_file() else ""
        raise TokenizerError(f"{folder} has neither tokenizer.json nor vocab.json with merges.txt{model}. {_FILES}")
    control, size = fields["control"], len(fields["pieces"])
    eos = _eos_ids(folder, names, control, size)
    if not eos:
        raise TokenizerError(
            f"the tokenizer in {folder} names no token that ends a text, and the vocabulary has no {EOT}. "
            "Use a folder with tokenizer_config.json or generation_config.json"
        )
    return Vocabulary(**fields, eos_ids=eos, template=_template(folder, config), names=names)


def _vocab_and_merges(folder: Path, config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return fields of the Vocabulary of vocab.json and merges.txt, which say nothing about the split."""
    kind = config.get("tokenizer_class", "GPT2Tokenizer")
    split = splits.CLASSES.get(kind)
    if split is None:
        raise TokenizerError(
            f"the tokenizer class {str(kind)[:60]!r} in {folder} needs tokenizer.json. Use a folder that has it"
        )
    vocab = _json(folder / "vocab.json")
    lines = _text(folder / "merges.txt").splitlines()
    if lines and lines[0].startswith("#version"):
        lines = lines[1:]
    merges = [tuple(line.split(" ")) for line in lines if line]
    vocabulary.check_ids(str(folder), vocab)
    control = {text: vocab[text] for text in {EOT, *names.values()} if text in vocab}
    control |= {
        token["content"]: int(number)
        for number, token in (config.get("added_tokens_decoder") or {}).items()
        if token.get("special")
    }
    encode, pieces = vocabulary.byte_level(str(folder), vocab, merges, split, control, {})
    return {"encode": encode, "pieces": pieces, "control": control}


def _fast(folder: Path, config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return fields of the Vocabulary of tokenizer.json."""
    path = folder / "tokenizer.json"
    content = _json(path)
    try:
        added = content.get("added_tokens") or []
        control = {token["content"]: token["id"] for token in added if token["special"]}
        others = {token["content"]: token["id"] for token in added if not token["special"]}
        found = {
            "control": control,
            "strips_left": frozenset(token["content"] for token in added if token["special"] and token["lstrip"]),
            "strips_right": frozenset(token["content"] for token in added if token["special"] and token["rstrip"]),
            "bos_ids": _bos_ids(content, config, names, control),
        }
        split = splits.of_fast_tokenizer(content)
        is_plain = not any(t["lstrip"] or t["rstrip"] or t["single_word"] for t in added if not t["special"])
        if split is not None and is_plain:
            try:
                encode, pieces = _known(folder, content["model"], split, control, others)
                return {**found, "encode": encode, "pieces": pieces}
            except OutOfOrder:
                pass
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(
            f"{path} is not a tokenizer of the `tokenizers` library: {error!r:.200}. {_FILES}"
        ) from error
    return {**found, **_general(path, content)}


def _known(
    folder: Path, model: Mapping[str, Any], split: Split, control: Mapping[str, int], others: Mapping[str, int]
) -> tuple[Callable[[str], list[int]], list[bytes]]:
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    return vocabulary.byte_level(str(folder), dict(model["vocab"]), merges, split, control, others)


def _general(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    from tokenizers import Tokenizer

    from models.text import general_bpe

    try:
        tokenizer = Tokenizer.from_str(_text(path))
    except Exception as error:  # the library raises bare Exceptions
        raise TokenizerError(f"cannot read {path}: {str(error)[:200]}. {_FILES}") from error
    ids = tokenizer.get_vocab(with_added_tokens=True)
    vocabulary.check_ids(str(path.parent), ids)
    encode, encode_rest = general_bpe.encoders(tokenizer, str(path))
    pieces, leading_space = general_bpe.pieces(tokenizer, str(path.parent), 1 + max(ids.values()))
    return {"encode": encode, "encode_rest": encode_rest, "pieces": pieces, "leading_space": leading_space}


def _bos_ids(
    content: Mapping[str, Any], config: Mapping[str, Any], names: Mapping[str, str], control: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the ids that begin each prompt: what the configuration says, else what the post-processor adds."""
    adds = config.get("add_bos_token")
    if isinstance(adds, bool):
        bos = control.get(names.get("bos_token", ""))
        return (bos,) if adds and bos is not None else ()
    processor = content.get("post_processor") or {}
    steps = processor["processors"] if processor.get("type") == "Sequence" else [processor]
    ids: list[int] = []
    for step in steps:
        if step.get("type") == "TemplateProcessing":
            for part in step["single"]:
                if "Sequence" in part:
                    break
                ids += step["special_tokens"][part["SpecialToken"]["id"]]["ids"]
    return tuple(ids)


def _eos_ids(folder: Path, names: Mapping[str, str], control: Mapping[str, int], size: int) -> tuple[int, ...]:
    """Return the tokenizer's own end-of-text id, then the model's: those of generation_config.json or config.json."""
    own = control.get(names.get("eos_token", EOT))
    ids = [] if own is None else [own]
    for name in ("generation_config.json", "config.json"):
        value = _optional(folder, name).get("eos_token_id")
        found = [i for i in (value if isinstance(value, list) else [value]) if type(i) is int and 0 <= i < size]
        if value is not None:
            ids += found
            break
    return tuple(dict.fromkeys(ids))


def _names(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the named special tokens, as transformers gives them to chat templates."""
    names = {}
    for name in NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            names[name] = text
    return names


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the source of the folder's chat template, if it has one."""
    if (folder / "chat_template.jinja").is_file():
        return _text(folder / "chat_template.jinja")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {t["name"]: t["template"] for t in found if isinstance(t, dict) and {"name", "template"} <= t.keys()}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _optional(folder: Path, name: str) -> dict[str, Any]:
    return _json(folder / name) if (folder / name).is_file() else {}


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > LONGEST_FILE:
            raise TokenizerError(f"{path} has more than {LONGEST_FILE >> 20} MiB. {_FILES}")
        return path.read_text(encoding="utf-8-sig")  # a byte order mark is no part of the text
    except (OSError, UnicodeError) as error:
        raise TokenizerError(f"cannot read {path}: {error}. Use the file that belongs to the model") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise TokenizerError(f"{path} is invalid JSON: {error}. Use the file that belongs to the model") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} is not a JSON object. Use the file that belongs to the model")
    return content

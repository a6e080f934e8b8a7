"""Tokenizers of each kind against transformers, from folders and from GGUF metadata."""

from __future__ import annotations

import json
import random
import re
import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from models.gguf import tokenizer_gguf
from models.sources import catalog
from models.text import general_bpe, vocabulary
from models.text.ranks import TokenizerError
from models.text.tokenizer import Detokenizer, TextError, Tokenizer, load_tokenizer
from models.text.tokenizer_files import from_folder
from tests.support import gguf
from tests.support.tokenizers import CONTROL, KINDS, gguf_metadata, strings, train, write

COUNT = 50 * settings.default.max_examples  # strings
OURS = ("gpt2", "smollm", "llama-bpe", "qwen2")  # by tiktoken


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("kinds")
    return lambda kind: root / kind if (root / kind).is_dir() else write(root / kind, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_strings_have_the_ids_of_transformers(folder_of: Callable[[str], Path], kind: str) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder_of(kind))
    tokenizer = Tokenizer(from_folder(folder_of(kind)))
    for text in strings(COUNT):
        special = reference(text, add_special_tokens=False).input_ids
        plain = reference(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert tokenizer.encode_rendered(text, {}) == special, text
        assert tokenizer.encode(text) == plain, text
        assert [*tokenizer.bos_ids, *special] == reference(text).input_ids
        assert tokenizer.decode(plain, begins=True) == reference.decode(plain, clean_up_tokenization_spaces=False), text


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_stream_join_and_keep_their_spaces(folder_of: Callable[[str], Path], kind: str) -> None:
    tokenizer = Tokenizer(from_folder(folder_of(kind)))
    for text in strings(100, seed=6):
        ids = tokenizer.encode(f" {text} the end")
        for cut in (1, 2, 5):
            stream = Detokenizer(tokenizer)
            pieces = [stream.feed(ids[i : i + cut]) for i in range(0, len(ids), cut)]
            assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)
            assert "\ufffd" not in "".join(pieces)
        assert tokenizer.decode(ids).startswith(" ")


@pytest.mark.parametrize("kind", [*OURS, "metaspace"])
def test_gguf_metadata_gives_the_same_tokenizer_as_the_folder(folder_of: Callable[[str], Path], kind: str) -> None:
    of_folder = Tokenizer(from_folder(folder_of(kind)))
    of_file = Tokenizer(tokenizer_gguf.from_gguf(gguf_metadata(kind)))
    for text in strings(COUNT, seed=7):
        assert of_file.encode(text) == of_folder.encode(text)
        assert of_file.encode_rendered(text, {}) == of_folder.encode_rendered(text, {})
    assert of_file.vocabulary.pieces == of_folder.vocabulary.pieces
    assert of_file.bos_ids == of_folder.bos_ids
    assert set(of_folder.eos_ids) <= set(of_file.eos_ids)


def test_a_sentencepiece_vocabulary_with_scores_is_read_as_transformers_reads_it() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    metadata = gguf_metadata("metaspace")
    fields = {"tokens": "tokens", "scores": "scores", "token_type": "token_type", "tokenizer_type": "model"}
    reference, _ = convert_gguf_tokenizer("llama", {k: metadata[f"tokenizer.ggml.{v}"] for k, v in fields.items()})
    tokenizer = Tokenizer(tokenizer_gguf.from_gguf(metadata))
    for text in strings(COUNT, seed=8):
        assert tokenizer.encode_rendered(text, {}) == reference.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_in_ordinary_text_are_ordinary(folder_of: Callable[[str], Path], kind: str) -> None:
    tokenizer = Tokenizer(from_folder(folder_of(kind)))
    text = "a" + "".join(CONTROL) + "b"
    assert not tokenizer.special_ids & {*tokenizer.encode(text)}
    assert tokenizer.decode(tokenizer.encode(text), begins=True) == text
    marked = tokenizer.encode_rendered("<|im_start|>\ue123\ue001<|im_end|>", {"\ue123\ue001": text})
    assert [i for i in marked if i in tokenizer.special_ids] == [tokenizer.vocabulary.control[t] for t in CONTROL[1:3]]
    assert text in tokenizer.decode(marked)


def test_an_id_of_every_file_ends_an_answer(tmp_path: Path) -> None:
    write(tmp_path, "qwen2")
    assert Tokenizer(from_folder(tmp_path)).eos_ids == (2,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert Tokenizer(from_folder(tmp_path)).eos_ids == (2, 3)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 0, 99999]}')
    assert Tokenizer(from_folder(tmp_path)).eos_ids == (2, 4, 0)


def test_a_byte_without_a_token_is_left_out() -> None:
    metadata = gguf_metadata("smollm")
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("Ą")] = "unused"  # stands for byte 4
    tokenizer = Tokenizer(tokenizer_gguf.from_gguf(metadata))
    assert tokenizer.decode(tokenizer.encode("the\x04 end")) == "the end"


def test_a_gguf_file_is_loaded_from_its_path(tmp_path: Path) -> None:
    metadata = gguf_metadata("llama-bpe")
    path = gguf.write(tmp_path / "model.gguf", "llama", metadata, {})
    resolved = catalog.replace(catalog.resolve("gpt2", "dummy"), tokenizer=path)
    assert load_tokenizer(resolved).encode("the end") == Tokenizer(tokenizer_gguf.from_gguf(metadata)).encode("the end")


GGUF: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"tokens": None}, "no tokenizer.ggml.tokens"),
    "numbers for tokens": ({"tokens": [1, 2]}, "no tokenizer.ggml.tokens"),
    "a token twice": ({"tokens": ["a", "a"]}, "twice"),
    "types that do not fit": ({"token_type": [1]}, "token_type"),
    "another model": ({"model": "bert"}, "'bert'"),
    "another pre-tokenizer": ({"pre": "tekken"}, "'tekken'"),
    "no pre-tokenizer": ({"pre": None}, "pre-tokenizer"),
    "no merges": ({"merges": None}, "no tokenizer.ggml.merges"),
    "an unknown merge": ({"merges": ["zq zq"]}, "merge 1"),
    "no scores": ({"model": "llama", "merges": None}, "scores"),
    "a token of megabytes": (
        {
            "model": "llama",
            "merges": None,
            "tokens": ["</s>", "x" * 4_000_000],
            "token_type": [3, 1],
            "scores": [0.0, 0.0],
        },
        "long tokens",
    ),
    "no end": ({"eos_token_id": None, "token_type": None}, "eos_token_id"),
}


@pytest.mark.parametrize(("changes", "says"), GGUF.values(), ids=GGUF.keys())
def test_gguf_metadata_that_cannot_be_read_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    metadata = gguf_metadata("smollm")
    for name, value in changes.items():
        metadata[f"tokenizer.ggml.{name}"] = value
        if value is None:
            del metadata[f"tokenizer.ggml.{name}"]
    with pytest.raises(TokenizerError, match=says):
        tokenizer_gguf.from_gguf(metadata)


def test_a_decoder_whose_tokens_have_no_bytes_is_refused_by_name(tmp_path: Path) -> None:
    from tokenizers import decoders

    write(tmp_path, "other")
    tokenizer = train("other")
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="WordPiece"):
        from_folder(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", [False, True])
def test_an_added_token_without_text_is_found_nowhere(tmp_path: Path, kind: str, special: bool) -> None:
    path = write(tmp_path, kind) / "tokenizer.json"
    expected = Tokenizer(from_folder(tmp_path)).encode("the end")
    content = json.loads(path.read_text())
    entry = content["added_tokens"][-1] | {"content": "", "id": 5000, "special": special}
    path.write_text(json.dumps(content | {"added_tokens": [*content["added_tokens"], entry]}))
    tokenizer = Tokenizer(from_folder(tmp_path))
    assert tokenizer.encode("the end") == tokenizer.encode_rendered("the end", {}) == expected


@pytest.mark.parametrize("kind", ["smollm", "metaspace"])
def test_a_token_without_text_in_a_gguf_file_is_found_nowhere(kind: str) -> None:
    expected = Tokenizer(tokenizer_gguf.from_gguf(gguf_metadata(kind))).encode("the end")
    for token_type in range(1, 7):
        metadata = gguf_metadata(kind)
        for name, value in (("tokens", ""), ("token_type", token_type), ("scores", -1.0)):
            metadata.get(f"tokenizer.ggml.{name}", []).append(value)
        assert Tokenizer(tokenizer_gguf.from_gguf(metadata)).encode("the end") == expected


MANY = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
MULTIPLYING: dict[str, dict[str, Any]] = {
    "a letter becomes a thousand": {"normalizer": MANY},
    "in a nested sequence": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [MANY]}]}},
    "nothing becomes a thousand": {"normalizer": {**MANY, "pattern": {"Regex": "b*"}}},
    "a long beginning": {"normalizer": {"type": "Prepend", "prepend": "a" * 1000}},
    "bytes as characters, again and again": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}] * 9}},
}  # fmt: skip


@pytest.mark.parametrize("parts", MULTIPLYING.values(), ids=MULTIPLYING)
def test_a_tokenizer_that_multiplies_texts_is_refused_by_its_part(tmp_path: Path, parts: dict[str, Any]) -> None:
    path = write(tmp_path, "other") / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    with pytest.raises(TokenizerError, match=rf"{next(iter(parts))} of .*tokenizer.json .* 256 .*Use"):
        from_folder(tmp_path)


def test_a_text_that_grows_too_long_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "other") / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {**MANY, "content": "a" * 100}}))
    tokenizer = Tokenizer(from_folder(tmp_path))
    assert len(tokenizer.encode("a")) == 100
    with pytest.raises(TextError):
        tokenizer.encode("a" * 200_000)


def test_a_tokenizer_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general_bpe, "PROBE_SECONDS", 0.05)
    ends = threading.Event()
    with pytest.raises(TokenizerError, match=r"tokenizer.json .* backtracks"):
        general_bpe.probe(lambda text: [ends.wait(60)], {}, "tokenizer.json")
    ends.set()
    monkeypatch.setattr(general_bpe, "PROBE_SECONDS", 20)
    general_bpe.probe(lambda text: [0], {}, "tokenizer.json")


def test_a_post_processor_adds_nothing_to_ordinary_text(tmp_path: Path) -> None:
    path = write(tmp_path, "other") / "tokenizer.json"
    part = {"Sequence": {"id": "A", "type_id": 0}}
    repeats = {"type": "TemplateProcessing", "single": [part] * 3, "pair": [part], "special_tokens": {}}
    expected = Tokenizer(from_folder(tmp_path)).encode("the end")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": repeats}))
    assert Tokenizer(from_folder(tmp_path)).encode("the end") == expected


def test_a_token_that_fills_pages_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "smollm") / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][-1]["content"] = "x" * 100_000
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="100,000 bytes"):
        Tokenizer(from_folder(tmp_path))


def test_the_longest_of_many_texts_is_found_without_comparing_each() -> None:
    rng = random.Random(4)
    for _ in range(200):
        texts = ["".join(rng.choices("ab<.", k=rng.randrange(1, 6))) for _ in range(9)]
        plain = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
        sample = "".join(rng.choices("ab<.", k=60))
        assert vocabulary.text_pattern([*texts, ""]).findall(sample) == plain.findall(sample)
    many = vocabulary.text_pattern([*(f"<|token {i}|>" for i in range(5000)), "<"])
    assert len(many.findall("<" * 200_000 + "<|token 77|>")) == 200_001
    chain = vocabulary.text_pattern("a" * i for i in range(1, 600))
    assert chain.findall("a" * 1000) == ["a" * 599, "a" * 401]


def test_files_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    for kind in ("smollm", "metaspace"):
        folder = write(tmp_path / kind, kind, chat_template="{{ bos_token }}!")
        (folder / "generation_config.json").write_text('{"eos_token_id": [4]}')
        plain = Tokenizer(from_folder(folder))
        (folder / "chat_template.jinja").write_text("{{ bos_token }}!", "utf-8")
        for path in folder.iterdir():
            path.write_text(path.read_text("utf-8"), "utf-8-sig")
        marked = Tokenizer(from_folder(folder))
        assert (marked.eos_ids, marked.encode("the end")) == (plain.eos_ids, plain.encode("the end"))
        assert marked.encode_chat([]) == plain.encode_chat([])


def test_a_run_of_combining_marks_is_normalized_in_linear_time() -> None:
    """Marks in the wrong order, whose sort by insertion takes CPython minutes."""
    marks = "\u0301\u0323\u0f73\u0344"
    long = vocabulary.nfc("a" + marks * 20_000)
    assert long[:2] == "\u1ea1\u0f71"
    for text in (
        "a" + marks * 50,
        "x" * 63 + marks * 40 + "e" + marks * 40,
        "\u1100\u1161" + "\u0323\u0301" * 100 + "é",
    ):
        assert vocabulary.nfc(text) == unicodedata.normalize("NFC", text)


def test_long_runs_are_encoded_in_time_by_every_pattern(folder_of: Callable[[str], Path]) -> None:
    for kind in KINDS:
        tokenizer = Tokenizer(from_folder(folder_of(kind)))
        for text in ("x" + " " * 50_000 + "x", "a" * 50_000, "x" + " \n" * 25_000, "1" * 50_000):
            assert tokenizer.decode(tokenizer.encode(text), begins=True) == text

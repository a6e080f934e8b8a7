"""Text to ids and back: GPT-2's ranks, a folder's tokenizer, and text that arrives in pieces."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference
from tokenizers import decoders, models, pre_tokenizers, trainers

from models.sources import catalog
from models.text import ranks
from models.text import tokenizer as loading
from models.text.ranks import TokenizerError
from models.text.tokenizer import Detokenizer, TextError, Tokenizer, load_tokenizer
from models.text.tokenizer_files import from_folder
from models.text.vocabulary import of_ranks
from tests.support.data import path_of

TEXT = (
    "First Citizen: we're 12 citizens, they'll say; I'd not!  Before we proceed any further,\n\n"
    "hear me speak. Größe, 東京 and 🙂🙂 cost 3.50 € \t each...\n"
) * 4


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return Tokenizer(of_ranks(ranks.from_file(path_of("gpt2.tiktoken"))))


def train(folder: Path, specials: tuple[str, ...] = (ranks.EOT,)) -> Reference:
    """Write the files of a small byte-level BPE into `folder` and return the reference."""
    reference = Reference(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    reference.train_from_iterator([TEXT], trainer)
    reference.add_special_tokens(list(specials))
    folder.mkdir(parents=True, exist_ok=True)
    reference.save(str(folder / "tokenizer.json"))
    reference.model.save(str(folder))
    vocab = {**reference.get_vocab(with_added_tokens=True)}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    return reference


def byte_ids(tokenizer: Tokenizer, raw: bytes | list[int]) -> list[int]:
    """Return the ids of single bytes."""
    return [tokenizer.vocabulary.pieces.index(bytes([byte])) for byte in raw]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    train(tmp_path_factory.mktemp("bpe"))
    return tmp_path_factory.getbasetemp() / "bpe0"


@pytest.fixture(scope="module")
def small(folder: Path) -> Tokenizer:
    return Tokenizer(from_folder(folder))


def resolved(**changes: Any) -> catalog.ResolvedModel:
    return catalog.replace(catalog.resolve("gpt2-medium", "dummy"), **changes)


@pytest.mark.data
def test_gpt2_has_its_known_ids(gpt2: Tokenizer) -> None:
    known = {
        "Hello world": [15496, 995],
        "I'll say: 3 dogs  \n": [40, 1183, 910, 25, 513, 6844, 220, 220, 198],
        "First Citizen:\nBefore we proceed": [5962, 22307, 25, 198, 8421, 356, 5120],
        "<|endoftext|>": [27, 91, 437, 1659, 5239, 91, 29],
    }
    for text, ids in known.items():
        assert gpt2.encode(text) == ids
        assert gpt2.decode(ids) == text
    assert gpt2.encode("<|endoftext|>", end_of_text="special") == [50256] == [*gpt2.eos_ids]
    assert (gpt2.vocab_size, gpt2.longest_token) == (50257, 128)
    assert gpt2.token_bytes(220) == b" "


@pytest.mark.data
def test_all_of_shakespeare_survives_encoding_and_decoding(gpt2: Tokenizer) -> None:
    text = path_of("shakespeare.txt").read_text(encoding="utf-8")
    ids = gpt2.encode(text)
    assert len(ids) == 338_025
    assert gpt2.decode(ids) == text


@given(text=st.text() | st.text(alphabet=" \n\t'sdtlévre1२.,東🙂<|endoftext>"))
@settings(max_examples=5 * settings.default.max_examples)
def test_a_folders_tokenizer_is_that_of_the_tokenizers_library(folder: Path, small: Tokenizer, text: str) -> None:
    reference = Reference.from_file(str(folder / "tokenizer.json"))
    assert small.encode(text, end_of_text="special") == reference.encode(text).ids
    assert small.decode(small.encode(text)) == text


def test_tokenizer_json_and_the_older_files_give_the_same_tokenizer(tmp_path: Path) -> None:
    reference = train(tmp_path, (ranks.EOT, "<|pad|>"))
    alone = Tokenizer(from_folder(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    whole = Tokenizer(from_folder(tmp_path))
    assert whole.encode(TEXT) == alone.encode(TEXT) == reference.encode(TEXT).ids
    assert alone.eos_ids[0] == reference.token_to_id(ranks.EOT)
    assert alone.token_bytes(reference.token_to_id("<|pad|>")) == b"<|pad|>"
    assert alone.vocab_size == reference.get_vocab_size()


@given(ids=st.lists(st.integers(0, 430)), cuts=st.lists(st.integers(0, 30)))
@settings(max_examples=5 * settings.default.max_examples)
def test_pieces_joined_are_the_whole_text(small: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    stream, pieces, place = Detokenizer(small), [], 0
    for cut in [*cuts, len(ids)]:
        pieces.append(stream.feed(ids[place : place + cut]))
        place += cut
    assert "".join([*pieces, stream.finish()]) == small.decode(ids[:place])


@given(raw=st.lists(st.sampled_from([0x24, 0x80, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xE6, 0xED, 0xF0, 0xF4, 0xFF])))
@settings(max_examples=5 * settings.default.max_examples)
def test_broken_bytes_stream_as_they_decode_at_once(small: Tokenizer, raw: list[int]) -> None:
    ids = byte_ids(small, raw)
    stream = Detokenizer(small)
    assert "".join([*(stream.feed([i]) for i in ids), stream.finish()]) == small.decode(ids)


def test_half_a_character_is_held_back_and_flushed_as_a_replacement(small: Tokenizer) -> None:
    ids = byte_ids(small, "é🙂".encode())
    stream = Detokenizer(small)
    assert [stream.feed([i]) for i in ids] == ["", "é", "", "", "", "🙂"]
    assert stream.finish() == ""
    assert stream.feed(ids[:1]) == ""
    assert stream.finish() == "\ufffd"


def test_ids_of_a_padded_vocabulary_decode_to_nothing_or_fold(small: Tokenizer) -> None:
    word = small.encode("we")
    assert small.decode([*word, small.vocab_size, 50303]) == "we"
    assert Tokenizer(small.vocabulary, fold=True).decode([word[0] + 3 * small.vocab_size]) == small.decode(word[:1])
    with pytest.raises(TextError, match="negative"):
        small.decode([-1])


@pytest.mark.parametrize("text", [" " * 1_000_000, " \n" * 500_000 + "x", "x" + "\t" * 2_000_000 + "x"])
def test_too_long_white_space_is_refused(small: Tokenizer, text: str) -> None:
    with pytest.raises(TextError, match=r"white space in one run.* Shorten"):
        small.encode(text)


def test_long_runs_below_the_bound_are_encoded_in_time(small: Tokenizer) -> None:
    began = time.thread_time()
    for text in (" " * 400_000 + "x", "a" * 1_000_000, "\ud800 lone"):
        small.encode(text)
    assert time.thread_time() - began < 10


def test_a_panic_of_the_encoder_is_a_named_error(small: Tokenizer) -> None:
    class PanicException(BaseException):
        pass

    def panicking(text: str) -> list[int]:
        raise PanicException("StackOverflow")

    broken = Tokenizer(replace(small.vocabulary, encode=panicking))
    with pytest.raises(TextError, match=r"4 characters cannot be tokenized\. Shorten"):
        broken.encode("text")


def _lines() -> list[str]:
    return [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]


RANK_FILES = {
    "no base64": (lambda lines: [*lines[:6], "€€ 6", *lines[7:]], "line 7 "),
    "no rank": (lambda lines: [*lines, "YWI="], "line 257 "),
    "a byte is missing": (lambda lines: lines[:255], "no byte 255"),
    "a rank twice": (lambda lines: [*lines, "YWI= 255"], "0 to 256, each once"),
    "a gap": (lambda lines: [*lines, "YWI= 300"], "each once"),
    "empty": (lambda lines: [], "no byte 0"),
}


@pytest.mark.parametrize(("spoil", "says"), RANK_FILES.values(), ids=RANK_FILES.keys())
def test_a_corrupt_rank_file_is_refused_with_its_line(tmp_path: Path, spoil: Any, says: str) -> None:
    path = tmp_path / "x.tiktoken"
    path.write_text("\n".join(spoil(_lines())))
    with pytest.raises(TokenizerError, match=says) as refusal:
        load_tokenizer(resolved(), path)
    assert "Set EB_TOKENIZER_FILE" in str(refusal.value)


def test_a_rank_file_is_used_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "bytes.tiktoken"
    path.write_text("\n".join(_lines()) + "\n")
    tokenizer = load_tokenizer(resolved(), path)
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (257, (256,))
    assert tokenizer.encode("az") == [97, 122]
    with pytest.raises(TokenizerError, match=r"No such file.* Set EB_TOKENIZER_FILE"):
        load_tokenizer(resolved(), tmp_path / "nowhere")


def _swap_merges(folder: Path) -> None:
    path = folder / "merges.txt"
    lines = path.read_text().splitlines()
    lines[1], lines[2] = lines[2], lines[1]
    path.write_text("\n".join(lines))


def _edit_vocab(folder: Path, change: Any) -> None:
    vocab = json.loads((folder / "vocab.json").read_text())
    change(vocab)
    (folder / "vocab.json").write_text(json.dumps(vocab))


FOLDERS = {
    "order": (_swap_merges, "comes after one with a higher id"),
    "unknown merge": (lambda f: (f / "merges.txt").write_text("Ġ 東"), "merge 1 'Ġ 東' is not in"),
    "no end of text": (lambda f: _edit_vocab(f, lambda v: v.pop(ranks.EOT)), "no <|endoftext|>"),
    "a byte": (lambda f: _edit_vocab(f, lambda v: v.pop("A")), "no token for byte 65"),
    "an id twice": (lambda f: _edit_vocab(f, lambda v: v.update(A=1)), "same id"),
    "no number": (lambda f: _edit_vocab(f, lambda v: v.update(A="1")), "whole number"),
    "broken": (lambda f: (f / "vocab.json").write_text("{"), "invalid JSON"),
    "another kind": (lambda f: (f / "tokenizer.json").write_text("{}"), "not a tokenizer of"),
    "a damaged file": (lambda f: (f / "tokenizer.json").write_text('{"model": {"type": "WordLevel"}}'), "cannot read"),
    "an unknown class": (
        lambda f: (f / "tokenizer_config.json").write_text('{"tokenizer_class": "XTokenizer"}'),
        "XTokenizer",
    ),
    "nothing": (lambda f: (f / "vocab.json").unlink(), "neither"),
}


@pytest.mark.parametrize(("spoil", "says"), FOLDERS.values(), ids=FOLDERS.keys())
def test_an_inconsistent_folder_is_refused_by_name(tmp_path: Path, spoil: Any, says: str) -> None:
    train(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    spoil(tmp_path)
    with pytest.raises(TokenizerError, match=says.replace("|", r"\|")) as refusal:
        load_tokenizer(resolved(tokenizer=tmp_path))
    assert ". Use " in str(refusal.value)


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path) -> None:
    config = {**resolved().config, "vocab_size": 300}
    with pytest.raises(TokenizerError, match=r"has 351 ids, .* 300"):
        load_tokenizer(resolved(tokenizer=folder, config=config))


def test_without_ranks_the_error_names_the_remedy_and_random_weights_borrow_bards(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(name: str) -> tiktoken.Encoding:
        raise ConnectionError("no route")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(TokenizerError, match=r"ConnectionError.* Set EB_TOKENIZER_FILE"):
        load_tokenizer(resolved(load_format="auto"))
    monkeypatch.setattr(loading, "BARD", folder)
    borrowed = load_tokenizer(resolved())
    assert "bard's tokenizer is used" in str(borrowed.warning)
    assert len(borrowed.decode(range(50_257))) > 50_257
    monkeypatch.setattr(loading, "BARD", tmp_path)
    with pytest.raises(TokenizerError, match="Set EB_TOKENIZER_FILE"):
        load_tokenizer(resolved())


def test_a_download_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    released = Event()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: released.wait(60))
    with pytest.raises(TokenizerError, match=r"no answer within 0\.2 s"):
        ranks.from_tiktoken(timeout_s=0.2)
    released.set()


def test_offline_nothing_is_tried_unless_there_is_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tiktoken.Encoding("gpt2", pat_str=".", mergeable_ranks={b"a": 0}, special_tokens={})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: cached)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "none"))
    with pytest.raises(TokenizerError, match="HF_HUB_OFFLINE"):
        ranks.from_tiktoken()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    assert ranks.from_tiktoken() is cached

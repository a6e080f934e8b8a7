"""A: bodies that are too much, too little, or no JSON, in three dialects."""

from __future__ import annotations

import gzip
import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import requests
from harness import PATIENCE, REFUSED, Watched
from table import Act, Case, Raw, all_of, body, refuses, text_of

from tests.support import in_background
from tests.support.servers import Answer, read_answer

MB = 1 << 20
EVERYWHERE = dict.fromkeys(REFUSED, 200)
NATIVE, OPENAI, TGI = ({path: code} for path, code in REFUSED.items())
NO_NUMBERS = [Raw(text) for text in ("NaN", "Infinity", "-Infinity", "1e999")]
FLOATS = {
    "/inference": ("temperature", "top_p", "timeout_s"),
    "/v1/completions": ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"),
    "/generate": ("temperature", "top_p", "typical_p", "frequency_penalty", "repetition_penalty"),
}


def a_key_twice(server: Watched) -> None:
    for path, code in REFUSED.items():
        key = b'"inputs"' if path == "/generate" else b'"prompt"'
        answer = server.ask(path, b"{" + key + b': "first", ' + body(path)[1:])
        assert answer.status == code
        assert key.strip(b'"') in answer.body


def floats_must_be_finite(server: Watched) -> None:
    for path, code in REFUSED.items():
        for name in FLOATS[path]:
            for number in NO_NUMBERS:
                answer = server.ask(path, body(path, **{name: number}))
                assert (answer.status, b"finite" in answer.body) == (code, True), (name, number)
    zero = [
        text_of(path, server.ask(path, body(path, temperature=Raw(text))))
        for path in ("/inference", "/v1/completions")
        for text in ("0", "-0.0")
    ]
    assert zero[0] == zero[1]
    assert zero[2] == zero[3]


def unknown_fields_are_named(server: Watched) -> None:
    for path in REFUSED:
        answer = server.ask(path, body(path, promt="x"))
        assert answer.status == 200
        assert "promt" in answer.headers["X-Ignored-Params"]
    refuses({"suffix": "x"}, codes=OPENAI, says="suffix")(server)
    refuses({"grammar": {"type": "json"}}, codes=TGI, says="grammar")(server)


def a_missing_prompt_is_asked_for(server: Watched) -> None:
    refuses({"prompt": ...}, says="missing")(server)
    for path in ("/inference", "/v1/completions"):
        answer = server.ask(path, body(path, prompt=..., promt="x"))
        assert answer.status == 400
        assert answer.json["error"]["param"] == "prompt"
        assert "promt" in answer.json["error"]["message"]


def null_characters_come_back(server: Watched) -> None:
    answer = server.ask("/inference", body("/inference", prompt="a\0b", tokens=1))
    assert text_of("/inference", answer).startswith("a\0b")


def a_byte_order_mark_is_read_over(server: Watched) -> None:
    for path in REFUSED:
        assert server.ask(path, b"\xef\xbb\xbf" + body(path)).status == 200


def too_much(*sizes: int, chunked: bool) -> Act:
    """Return the act of a client that sends so many MB, all of it before it reads."""

    def act(server: Watched) -> None:
        for (path, size), connection in product(zip(REFUSED, sizes), ("keep-alive", "close")):
            data: Any = (b"x" * MB for _ in range(size)) if chunked else b"x" * (size * MB)
            reply = requests.post(
                f"http://127.0.0.1:{server.port}{path}", data=data, timeout=60,
                headers={"Content-Type": "application/json", "Connection": connection},
            )  # fmt: skip
            server.note(path, Answer(reply.status_code, reply.headers, reply.content))
            assert reply.status_code == 413, (path, size)
            assert "1,048,576 bytes" in reply.text

    return act


def a_hundred_thousand_chunks(server: Watched) -> None:
    sent = body("/inference", prompt="y" * 100_000)
    head = b"POST /inference HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    with server.connect() as sock:
        sock.sendall(head + b"".join(b"1\r\n%c\r\n" % byte for byte in sent) + b"0\r\n\r\n")
        answer = read_answer(sock)
    server.note("/inference", answer)
    assert answer.status == 400
    assert answer.json["error"]["code"] == "context_length_exceeded"


def a_length_below_the_body(server: Watched) -> None:
    with server.connect() as sock:
        sock.sendall(
            b"POST /inference HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 9\r\n\r\n"
            + body("/inference")
        )
        answer = read_answer(sock)
    server.note("/inference", answer)
    assert answer.status == 400


def the_type_is_asked_for_but_by_the_original(server: Watched) -> None:
    for kind in ("", "text/plain", "application/x-www-form-urlencoded"):
        assert server.ask("/inference", body("/inference"), Content_Type=kind).status == 200
        refuses({}, codes=dict.fromkeys(("/v1/completions", "/generate"), 415),
                says="Content-Type: application/json", Content_Type=kind)(server)  # fmt: skip


def a_key_twice_among_many(server: Watched) -> None:
    pairs = [f'"k{i}": {i}' for i in range(15_000)]
    sent = f'{{"inner": {{{", ".join(pairs)}, "k14999": 1}}}}'.encode()
    began = time.monotonic()
    with in_background(lambda: [refuses(sent, says="'k14999'")(server) for _ in range(3)]):
        beside = server.ask("/inference", body("/inference", tokens=30))
    assert text_of("/inference", beside)
    assert time.monotonic() - began < PATIENCE


def lists_of_wrong_items(server: Watched) -> None:
    """Send far too many items for every list there is, from as many clients as the server has threads."""
    ones = [1] * 12_000
    lists = [
        ("/inference", body("/inference", stop=ones)),
        ("/v1/completions", body("/v1/completions", stop=ones)),
        ("/v1/completions", body("/v1/completions", stop_token_ids=["x"] * 12_000)),
        ("/v1/chat/completions", json.dumps({"messages": ones}).encode()),
        ("/generate", body("/generate", stop_sequences=ones)),
        ("/detokenize", json.dumps({"tokens": [-1] * 12_000}).encode()),
    ]
    with ThreadPoolExecutor(server.places) as pool:
        answers = pool.map(lambda pair: server.ask(*pair), lists * 100)
        assert {answer.status for answer in answers} == {400, 422}


def a_text_too_long_to_tokenize(server: Watched) -> None:
    for name in ("prompt", "inputs"):
        answer = server.ask("/tokenize", json.dumps({name: "the " * 225_000}).encode())
        assert answer.status == 400
        assert answer.json["error"]["code"] == "context_length_exceeded"
    text = "the house " * 1200
    with ThreadPoolExecutor(server.places) as pool:
        sent = [json.dumps({"inputs": text}).encode()] * 40
        answers = list(pool.map(lambda each: server.ask("/tokenize", each), sent))
    assert {answer.status for answer in answers} == {200}
    assert all("".join(piece["text"] for piece in answer.json) == text for answer in answers)


A_BOMB = gzip.compress(bytes(20 * MB))
CASES = [
    Case("A1", "an empty body", all_of(refuses(b"", b" \n", says="is empty"), refuses(b"", says="{"))),
    Case("A2", "a brace too few", refuses(b"{bad", says="line 1, column 2")),
    Case("A3", "JSON that is no object", refuses(*(b"[]", b"null", b'"x"', b"5", b"true"), says="object")),
    Case("A4", "a key twice", a_key_twice),
    Case("A5", "an integer of 5,000 digits", refuses({"tokens": Raw("1" * 5000)}, says="too long")),
    Case("A6", "numbers that are not finite", floats_must_be_finite),
    Case("A7", "no tokens, or fewer", all_of(
        refuses({"tokens": -2}, says="1"), refuses({"tokens": 0}, {"tokens": -1}, says="1", codes=NATIVE | TGI))),
    Case("A8", "a prompt that is no text", all_of(
        refuses(*({"prompt": p} for p in (5, None, {}, True))),
        refuses({"prompt": ["x"]}, codes=NATIVE | TGI))),
    Case("A9", "fields that nobody knows, and known ones that cannot be", unknown_fields_are_named),
    Case("A10", "no prompt", a_missing_prompt_is_asked_for),
    Case("A11", "UTF-16, broken UTF-8, and a byte order mark", all_of(
        refuses(json.dumps({"prompt": "x"}).encode("utf-16"), b'{"prompt": "\xff"}', says="UTF-8"),
        a_byte_order_mark_is_read_over)),
    Case("A12", "a null character in the prompt", null_characters_come_back),
    Case("A13", "2 to 20 MB with a length", too_much(20, 2, 10, chunked=False)),
    Case("A14", "2 to 20 MB in chunks", too_much(2, 20, 10, chunked=True)),
    Case("A15", "100,000 chunks of a byte", a_hundred_thousand_chunks),
    Case("A16", "a length below the body", a_length_below_the_body),
    Case("A17", "another content type, or none", the_type_is_asked_for_but_by_the_original),
    Case("A18", "compressed bodies", refuses(
        gzip.compress(b'{"prompt": "x"}'), A_BOMB, codes=dict.fromkeys(REFUSED, 415),
        says="Content-Encoding", Content_Encoding="gzip")),
    Case("A19", "100,000 bad requests, each with an id of its own",
         tests=("tests/api/test_operations.py::test_a_hundred_thousand_refused_requests_leave_nothing_behind",)),
    Case("A20", "a key twice among many", a_key_twice_among_many, growth=40 * MB,
         tests=("tests/api/test_bodies.py::test_a_key_that_is_there_twice_is_found_in_one_pass",)),
    Case("A21", "lists of thousands of wrong items", lists_of_wrong_items, quick=False,
         tests=("tests/api/test_bodies.py::test_no_kind_of_value_costs_much_to_check_in_any_field",)),
    Case("A22", "a text that is too long to tokenize, and many long ones", a_text_too_long_to_tokenize, quick=False,
         tests=("tests/api/test_bodies.py::test_a_large_body_to_tokenize_needs_a_place_and_a_small_one_none",)),
]  # fmt: skip

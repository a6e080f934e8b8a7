"""A: bodies that are too much, too little, or no JSON. The app refuses most of them alike whoever brings them."""

from __future__ import annotations

from itertools import product
from typing import Any

import requests
from harness import MB, REFUSED, Watched
from table import Act, Case, body

from tests.support.servers import Answer, read_answer

ERRORS, BODIES, BAD = (f"tests/api/test_{name}.py::test_" for name in ("native_errors", "bodies", "bad_bodies"))
BAD_BODY, BAD_FIELD = f"{BAD}a_bad_body_is_refused", f"{ERRORS}a_bad_field_is_refused_with_value_bound_and_remedy"


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


def sent_as_it_is(server: Watched, head: bytes, sent: bytes) -> Answer:
    """Return the answer to a body under headers of the test's own."""
    with server.connect() as sock:
        sock.sendall(
            b"POST /inference HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + head + b"\r\n\r\n" + sent
        )
        answer = read_answer(sock)
    server.note("/inference", answer)
    assert answer.status == 400
    return answer


def a_hundred_thousand_chunks(server: Watched) -> None:
    sent = b"".join(b"1\r\n%c\r\n" % byte for byte in body("/inference", prompt="y" * 100_000))
    answer = sent_as_it_is(server, b"Transfer-Encoding: chunked", sent + b"0\r\n\r\n")
    assert answer.json["error"]["code"] == "context_length_exceeded"


def a_length_below_the_body(server: Watched) -> None:
    sent_as_it_is(server, b"Content-Length: 9", body("/inference"))


CASES = [
    Case("A1", "an empty body", tests=(BAD_BODY,)),
    Case("A2", "a brace too few", tests=(BAD_BODY,)),
    Case("A3", "JSON that is no object", tests=(BAD_BODY,)),
    Case("A4", "a key twice", tests=(BAD_BODY,)),
    Case("A5", "an integer of 5,000 digits", tests=(BAD_BODY,)),
    Case("A6", "numbers that are not finite", tests=(BAD_BODY, f"{BAD}numbers_are_finite")),
    Case("A7", "no tokens, or fewer", tests=(BAD_FIELD,)),
    Case("A8", "a prompt that is no text", tests=(BAD_FIELD,)),
    Case("A9", "fields that nobody knows, and known ones that cannot be",
         tests=("tests/api/test_unsupported.py::test_a_field_that_would_change_the_answer_is_refused_by_name",)),
    Case("A10", "no prompt", tests=(f"{BAD}without_a_prompt_it_is_asked_for",)),
    Case("A11", "UTF-16, broken UTF-8, and a byte order mark", tests=(BAD_BODY, f"{BAD}a_byte_order_mark_is_read_over")),
    Case("A12", "a null character in the prompt",
         tests=("tests/api/test_native.py::test_any_text_is_a_prompt_and_comes_back_whole",)),
    Case("A13", "2 to 20 MB with a length", too_much(20, 2, 10, chunked=False)),
    Case("A14", "2 to 20 MB in chunks", too_much(2, 20, 10, chunked=True)),
    Case("A15", "100,000 chunks of a byte", a_hundred_thousand_chunks),
    Case("A16", "a length below the body", a_length_below_the_body),
    Case("A17", "another content type, or none",
         tests=("tests/api/test_completion_fields.py::test_a_body_must_say_that_it_is_json",)),
    Case("A18", "compressed bodies", tests=(f"{BAD}a_compressed_body_is_not_unpacked",)),
    Case("A19", "100,000 bad requests, each with an id of its own",
         tests=("tests/api/test_operations.py::test_a_hundred_thousand_refused_requests_leave_nothing_behind",)),
    Case("A20", "a key twice among many", tests=(f"{BODIES}a_key_that_is_there_twice_is_found_in_one_pass",)),
    Case("A21", "lists of thousands of wrong items",
         tests=(f"{BODIES}no_kind_of_value_costs_much_to_check_in_any_field", "tests/faults/cases_storms.py::hostile_bodies")),
    Case("A22", "a text that is too long to tokenize, and many long ones",
         tests=(f"{BODIES}a_large_body_to_tokenize_needs_a_place_and_a_small_one_none",)),
]  # fmt: skip

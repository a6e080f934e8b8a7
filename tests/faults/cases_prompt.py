"""B: prompts, tokens and sampling parameters."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cases_body import NATIVE, NO_NUMBERS, OPENAI, TGI
from harness import PATIENCE, REFUSED, SLOTS, Watched
from table import LOOPS, Case, Raw, all_of, body, refuses, text_of

from tests.support.fakes import EOT
from tests.support.servers import free_port

CONTEXT = 1024
CHAT = {"/v1/chat/completions": 400}
IDS = {"/v1/completions": 400}
NEIGHBOURS = [body("/inference", prompt=f"neighbour {i}", tokens=300, seed=i) for i in range(SLOTS - 1)]


def ids_of(server: Watched, text: str) -> list[int]:
    """Return a text's ids with end-of-text as the token."""
    answer = server.ask("/tokenize", json.dumps({"prompt": text}).encode())
    return list(answer.json["tokens"])


def neighbours(server: Watched) -> list[str]:
    """Return what seven requests at once are told."""
    with ThreadPoolExecutor(len(NEIGHBOURS)) as pool:
        answers = pool.map(lambda sent: server.ask("/inference", sent), NEIGHBOURS)
        return [text_of("/inference", answer) for answer in answers]


def end_of_text_is_a_token_or_text(server: Watched) -> None:
    for prompt, ends in ((f"a{EOT}b", 1), (f"{EOT}a{EOT}{EOT}", 3)):
        special = ids_of(server, prompt)
        assert len(special) == ends + len(prompt.replace(EOT, ""))
        answer = server.ask("/v1/completions", body("/v1/completions", prompt))
        assert answer.json["usage"]["prompt_tokens"] == len(special)
        details = {"details": True, "decoder_input_details": True}
        answer = server.ask("/generate", body("/generate", prompt, **details))
        assert [each["id"] for each in answer.json["details"]["prefill"]] == special
        answer = server.ask("/inference", body("/inference", prompt))
        assert text_of("/inference", answer).startswith(prompt)
        assert server.told(answer.headers["X-Request-Id"])["prompt_tokens"] > len(special)


def lists_of_prompts(server: Watched) -> None:
    path = "/v1/completions"
    ids = ids_of(server, "the")
    for prompt, n in ((["a", "b"], 2), (ids, 1), ([ids, ids, ids], 3)):
        answer = server.ask(path, body(path, prompt))
        assert (answer.status, len(answer.json["choices"])) == (200, n)
    began = time.monotonic()
    refuses({"prompt": ["x"] * 65}, {"prompt": ["x"] * 100_000}, {"prompt": []}, {"prompt": [[]]}, codes=IDS)(server)
    assert time.monotonic() - began < PATIENCE


def strange_ids_harm_no_neighbour(server: Watched) -> None:
    last = ids_of(server, EOT)[0]
    path = "/v1/completions"
    alone = neighbours(server)
    with ThreadPoolExecutor(1) as pool:
        together = pool.submit(neighbours, server)
        for bad in ([-1], [last + 1], [2**40], [True], [1, last + 1]):
            refuses({"prompt": bad}, codes=IDS)(server)
        assert server.ask(path, body(path, [last])).status == 200
        assert together.result() == alone


def a_full_context_has_no_room(server: Watched) -> None:
    prompt = "x" * CONTEXT
    assert len(ids_of(server, prompt)) == CONTEXT
    refuses({"prompt": prompt, "tokens": 1}, says="1,024")(server)
    refuses({"prompt": prompt, "tokens": ...}, says="Shorten",
            codes={path: code for path, code in REFUSED.items() if path != "/inference"})(server)  # fmt: skip
    answer = server.ask("/inference", body("/inference", prompt[1:], tokens=1))
    assert answer.status == 200


def a_stream_joins_to_the_whole(server: Watched) -> None:
    fields = {"prompt": "😀 the", "tokens": 200, "seed": 3}
    whole = text_of("/v1/completions", server.ask("/v1/completions", body("/v1/completions", **fields)))
    answer = server.ask("/v1/completions", body("/v1/completions", **fields, stream=True))
    events = answer.body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(each.removeprefix("data: "))["choices"][0] for each in events[:-2]]
    assert "".join(chunk["text"] for chunk in chunks) == whole


def stops_cut(server: Watched) -> None:
    path, fields = "/v1/completions", {"prompt": "the house", "tokens": 60, "seed": 5}
    whole = text_of(path, server.ask(path, body(path, **fields)))
    spanning = next(two for i in range(10, 50) if "\ufffd" not in (two := whole[i : i + 2]) and len(two) == 2)
    for stop, expected in (
        (["never to be found"], whole), ("the house", whole), ([spanning, "nor this"], whole[: whole.index(spanning)]),
    ):  # fmt: skip
        assert text_of(path, server.ask(path, body(path, **fields, stop=stop))) == expected


def an_absent_length_has_a_default(server: Watched) -> None:
    for tokens in (..., None):
        path = "/v1/completions"
        answer = server.ask(path, body(path, tokens=tokens, ignore_eos=True))
        assert answer.json["usage"]["completion_tokens"] == 16
        answer = server.ask("/generate", body("/generate", tokens=tokens, details=True, truncate=4))
        details = answer.json["details"]
        room = CONTEXT - 4
        assert details["generated_tokens"] == room or details["finish_reason"] == "eos_token"
    refuses({"tokens": ...}, {"tokens": None}, codes=NATIVE, says="num_tokens")(server)


def other_models_are_not_there(server: Watched) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        said = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {}
        answer = server.ask(path, body(path, model="gpt-5", **said))
        assert answer.status == 404
        assert Path(server.model).name in answer.json["error"]["message"]


def chat(*messages: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": list(messages), "max_tokens": 4, **fields}).encode()


def pictures_are_not_fetched(server: Watched) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as bait:
        bait.setblocking(False)
        url = f"http://127.0.0.1:{bait.getsockname()[1]}/x.png"
        part = {"type": "image_url", "image_url": {"url": url}}
        refuses(chat({"role": "user", "content": [part]}), codes=CHAT)(server)
        assert server.ask("/v1/chat/completions", chat({"role": "user", "content": "hi"})).status == 200
        try:
            bait.accept()
        except BlockingIOError:
            return
        raise AssertionError("somebody came for the picture")


def company_changes_nothing(server: Watched) -> None:
    sent = body("/inference", tokens=40, temperature=0)
    alone = text_of("/inference", server.ask("/inference", sent))
    with ThreadPoolExecutor(SLOTS) as pool:
        others = pool.map(lambda each: server.ask("/inference", each), NEIGHBOURS)
        together = [pool.submit(server.ask, "/inference", sent) for _ in range(3)]
        assert {text_of("/inference", each.result()) for each in together} == {alone}
        assert {answer.status for answer in others} == {200}


FLAGS = [{"stream": "true"}, {"stream": 1}]
OVER_THE_CAP = [{"n": value} for value in (0, 22, 10**6, 10**18)]
BIASES = [{str(10**6): 1}, {"-1": 1}, {str(i): 1 for i in range(301)}, {str(i): 1 for i in range(50_000)}]
CASES = [
    Case("B1", "an empty prompt", refuses({"prompt": ""})),
    Case("B2", "end-of-text in the prompt", end_of_text_is_a_token_or_text),
    Case("B3", "a prompt of the whole context", a_full_context_has_no_room),
    Case("B4", "lists of prompts, and of too many", lists_of_prompts),
    Case("B5", "ids beyond the vocabulary beside seven neighbours", strange_ids_harm_no_neighbour),
    Case("B6", "a prompt that cannot fit whatever its tokens",
         refuses({"prompt": "x" * 200_000}, says="bytes"),
         tests=("tests/api/test_native_errors.py::test_what_cannot_fit_is_not_even_tokenized",)),
    Case("B7", "characters split over tokens in a stream", a_stream_joins_to_the_whole,
         tests=("tests/api/test_streaming.py::test_what_a_reader_sees_joins_to_the_whole_text",)),
    Case("B8", "far too many choices", refuses(*OVER_THE_CAP, codes=OPENAI)),
    Case("B9", "stops that are none, too many, too long, and those that cut", all_of(
        refuses({"stop": ""}, {"stop": list("abcdefghijklmnopq")}, {"stop": "x" * 10_000}, codes=NATIVE | OPENAI),
        refuses({"stop": [""]}, {"stop": list("abcdefghijklmnopq")}, {"stop": ["x" * 10_000]}, codes=TGI),
        stops_cut)),
    Case("B10", "biases of strange ids, of too many, of no numbers", refuses(
        *({"logit_bias": bias} for bias in BIASES),
        *({"logit_bias": Raw(f'{{"1": {number}}}')} for number in NO_NUMBERS), codes=OPENAI)),
    Case("B11", "no length", an_absent_length_has_a_default),
    Case("B12", "flags that are no booleans", all_of(
        refuses(*FLAGS, {"stream_options": {"include_usage": True}}, codes=OPENAI),
        refuses({"details": "true"}, codes=TGI), refuses(*FLAGS, codes=NATIVE))),
    Case("B13", "a model that is not served", other_models_are_not_there),
    Case("B14", "chats of nobody, of strangers, of pictures", all_of(
        refuses(chat(), chat({"role": "god", "content": "x"}), chat({"role": "user", "content": None}),
                chat({"role": "user", "content": [{"type": "audio"}]}), codes=CHAT),
        pictures_are_not_fetched)),
    Case("B15", "the same prompt alone and in a full batch", company_changes_nothing,
         policies=LOOPS, tests=("tests/generate/test_runner.py::test_the_text_of_a_request_does_not_depend_on_the_batch",)),
]  # fmt: skip

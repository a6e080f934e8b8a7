"""Chat workloads: real messages, conversations with the answers fed back, ShareGPT files, and the context of a model."""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from client import client
from client.workloads import catalog, chats, corpus
from client.workloads.arrivals import Arrivals
from client.workloads.sample import Draw
from terminal.console import USAGE
from tests.support.mock_server import CHAT, MockServer

BURST = Arrivals("burst")
TEXT = corpus.load()


def run(server: MockServer, *flags: str) -> int:
    return client.main(["--port", str(server.port), "--seed", "3", *flags], {"IP": "127.0.0.1"})


def result_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


@pytest.mark.parametrize("stream", [[], ["--no-stream"]])
def test_a_chat_is_answered_until_the_model_ends_it(
    server: MockServer, capsys: pytest.CaptureFixture[str], stream: list[str]
) -> None:
    assert run(server, "--workload", "chat", "--burst", "--numsamples", "9", *stream) == 0
    result = result_of(capsys)
    assert set(server.paths) == {CHAT}
    for body in server.asked:
        assert not body.keys() & {"max_tokens", "ignore_eos", "prompt"}
        assert [message["role"] for message in body["messages"]] == ["user"]
    assert result["output_lens"] == result["asked_lens"] == [5] * 9
    assert result["finish_reasons"] == {"stop": 9}
    assert result["turns"] is None
    assert (result["p50_ttft_ms"] is None) == bool(stream)


@pytest.mark.parametrize(("workload", "limit"), [("chat:3", "3"), ("chat", "")])
def test_a_cap_limits_the_answers_of_chats_and_is_written_down(
    server: MockServer, tmp_path: Path, workload: str, limit: str
) -> None:
    table = tmp_path / "requests.csv"
    assert run(server, "--workload", workload, "--burst", "--numsamples", "2", "--csv", str(table)) == 0
    assert [str(body.get("max_tokens", "")) for body in server.asked] == [limit] * 2
    with table.open() as file:
        assert [row["max_tokens"] for row in csv.DictReader(file)] == [limit] * 2


@pytest.mark.parametrize("load", [["--burst"], ["--load", "closed:2"]])
def test_each_turn_follows_the_real_answer_to_the_one_before(
    server: MockServer, capsys: pytest.CaptureFixture[str], load: list[str]
) -> None:
    assert run(server, "--workload", "multi-turn:3", "--numsamples", "7", *load) == 0
    by_length: dict[int, list[list[dict[str, str]]]] = {1: [], 3: [], 5: []}
    for body in server.asked:
        by_length[len(body["messages"])].append(body["messages"])
    assert [len(bodies) for bodies in by_length.values()] == [3, 2, 2]
    for messages in by_length[5]:
        assert messages[:3] in by_length[3]
        assert [message["role"] for message in messages] == ["user", "assistant"] * 2 + ["user"]
        assert messages[1]["content"].startswith(" x x")
    turns = result_of(capsys)["turns"]
    assert [turn["completed"] for turn in turns] == [3, 2, 2]
    assert [turn["cached_tokens"] for turn in turns] == [0, 28, 56]
    assert all(turn["mean_ttft_ms"] > 0 for turn in turns)


def test_an_agent_names_its_session_and_how_long_its_tool_may_take(server: MockServer) -> None:
    server.models = (200, {"data": [{"id": "bard", "owned_by": "effective-batching"}]})
    assert run(server, "--workload", "agent:3", "--numsamples", "1", "--burst") == 0
    planned = catalog.draw("agent:3", 12, BURST, 3, TEXT).planned
    firsts = {p.user: p for p in planned if p.chat and p.chat.turn == 1}
    assert len({" ".join(p.prompt.split()[: chats.INSTRUCTIONS]) for p in firsts.values()}) == 1
    assert server.asked[-1]["session"] == server.asked[-1]["program"]
    assert server.asked[-1]["program"].startswith("agent-0-")
    for p, after in pairwise(planned):
        assert p.call
        assert after.call
        if after.is_first:
            assert p.call.keep_s == 0
        else:
            assert 0 < after.call.tool_s <= p.call.keep_s


def test_the_turns_after_a_failed_one_are_not_sent(server: MockServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = lambda body: (400, {"error": {"message": "full"}}) if len(body["messages"]) > 1 else None
    assert run(server, "--workload", "multi-turn:4", "--numsamples", "8", "--burst") == 1
    result = result_of(capsys)
    assert (result["completed"], result["failed"], result["unsent"]) == (2, 2, 4)


def test_a_server_without_chats_is_refused_before_anything_is_sent(
    server: MockServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.chats = False
    assert run(server, "--workload", "chat", "--numsamples", "100") == USAGE
    assert "Use a server with that route" in capsys.readouterr().err
    assert server.paths == []


def test_requests_are_cut_to_the_context_that_the_server_reports(server: MockServer) -> None:
    server.info = (200, {"max_total_tokens": 64})
    assert run(server, "--workload", "fastgen", "--burst", "--numsamples", "4") == 0
    assert all(len(body["prompt"].split()) + body["num_tokens"] <= 64 for body in server.asked)
    server.asked.clear()
    server.info = (200, {"max_total_tokens": 8192})
    assert run(server, "--workload", "fixed:3000:9", "--burst", "--numsamples", "2") == 0
    assert [len(body["prompt"].split()) for body in server.asked] == [3000, 3000]
    assert run(server, "--numtokens_range", "8000", "--burst", "--numsamples", "1") == 0
    server.info = (200, {"max_total_tokens": 64})
    assert run(server, "--numtokens_range", "64", "--burst") == USAGE


def test_all_turns_of_a_conversation_fit_the_context() -> None:
    for context in (1024, 8192):
        planned = catalog.draw("multi-turn", 16, BURST, 1, TEXT, context).planned
        first, turns = planned[0], planned[:8]
        assert [p.chat.turn for p in turns if p.chat] == list(range(1, 9))
        assert sum(len(corpus.split(p.prompt)) + p.num_tokens for p in turns) < context
        assert first.num_tokens > context / 16
    with pytest.raises(ValueError, match="Use fewer turns"):
        catalog.draw("multi-turn:50", 50, BURST, 1, TEXT, 1024)


def test_no_message_comes_twice_before_all_have_come() -> None:
    drawn = [p.prompt for p in catalog.draw("chat", 300, BURST, 1, TEXT).planned]
    assert len(set(drawn)) == 300


SHAREGPT: list[Any] = [
    {"id": "a", "conversations": [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "we come to the king"},
                                  {"from": "gpt", "value": "the king is in the house"}]},
    {"conversations": [{"from": "human", "value": "no answer"}]},
    {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "who is he"},
                  {"role": "assistant", "content": "the man"}]},
    "nonsense",
]  # fmt: skip


def test_a_sharegpt_file_gives_its_first_questions_to_llm_mock_as_plain_prompts(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    file.write_text("\ufeff" + json.dumps(SHAREGPT))
    plan = catalog.draw(f"sharegpt:{file}", 2, BURST, 1, TEXT)
    assert {(p.prompt, p.num_tokens) for p in plan.planned} == {("we come to the king", 6), ("who is he", 2)}
    assert all(p.chat and not p.chat.capped for p in plan.planned)
    assert "2 of 4 entries" in plan.notes[0]
    assert "entry 2: has no question with an answer; entry 4: has no list" in plan.notes[0]
    assert "repeated" in catalog.draw(f"sharegpt:{file}", 5, BURST, 1, TEXT).notes[1]
    plain = catalog.draw(f"llm-mock:{file}", 2, BURST, 1, TEXT).planned
    asked = {(p.prompt, p.num_tokens, p.chat) for p in plain}
    assert asked == {("we come to the king", 51, None), ("who is he", 50, None)}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[{},\n{]", "line 2: invalid JSON"),
        ("{}", "holds a JSON dict"),
        ("[]", "the list is empty"),
        ("[1]", "entry 1: has no list of conversations"),
        ('[{"conversations": [1]}]', "a message is not an object"),
        ("\xff", "not a JSON list in UTF-8"),
        ("[" * 200_000, "not a JSON list in UTF-8"),
    ],
)
def test_a_bad_sharegpt_file_is_a_one_line_error(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=words) as caught:
        chats.sharegpt(file, Draw(3, None, TEXT))  # type: ignore[arg-type]
    assert "Use " in str(caught.value)
    assert "\n" not in str(caught.value)

"""`--model mock:...`: the whole API at the speed of a cost model, without weights, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from app import create_app, start
from client import compare
from client.workloads import corpus
from config import Config
from costs import mock
from costs.cost import Affine, Sizes, to_dict
from launch.command import with_absolute_paths
from tests.support import ROOT
from tests.support.servers import Server, free_port, run_app

FAST = "mock:llm-mock@1000"


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be no ranks of GPT-2's, however the machine is."""
    from models.text import ranks

    def none(timeout_s: float = 0.0) -> Any:
        raise ranks.TokenizerError("cannot load GPT-2's tokenizer. Set EB_TOKENIZER_FILE")

    monkeypatch.setattr(ranks, "from_tiktoken", none)


@pytest.fixture
def bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each byte be a token."""
    import tiktoken

    from models.text import ranks

    table = {bytes([byte]): byte for byte in range(256)}
    made = tiktoken.Encoding("bytes", pat_str=ranks.PATTERN, mergeable_ranks=table, special_tokens={ranks.EOT: 256})
    monkeypatch.setattr(ranks, "from_tiktoken", lambda timeout_s=0.0: made)


@contextmanager
def serving(**settings: Any) -> Iterator[FlaskClient]:
    app = create_app(Config(policy="dynamic", model=FAST, **settings))
    start(app).join()
    yield app.test_client()
    app.extensions["service"].stop()


def test_without_the_ranks_of_gpt2_a_word_of_the_clients_prompts_is_a_token(no_ranks: None) -> None:
    with serving() as client:
        body = {"prompt": corpus.load().at(7, 50), "num_tokens": 1}
        assert client.post("/inference", json=body).get_json()["prompt_tokens"] == 50


@pytest.fixture
def client(bytes_alone: None) -> Iterator[FlaskClient]:
    with serving() as client:
        yield client


def test_it_answers_in_all_dialects_with_whole_characters(client: FlaskClient) -> None:
    body = {"prompt": "To be", "num_tokens": 20}
    whole = client.post("/inference", json=body).get_json()
    assert (whole["num_tokens"], whole["finish_reason"]) == (20, "length")
    assert len(whole["completion"]) == len("To be") + 20  # a byte is a token, each a letter
    assert client.post("/inference", json=body).get_json()["completion"] == whole["completion"]
    generated = client.post("/generate", json={"inputs": "To be", "parameters": {"max_new_tokens": 20}})
    assert "To be" + generated.get_json()["generated_text"] == whole["completion"]
    told = client.get("/stats").get_json()["engine"]
    assert (told["model"], told["device"]) == (FAST, "none")
    assert told["kv"]["sequences_that_fit"]["1024"] == 2 * 64
    assert client.get("/health").get_json()["model"] == FAST


def test_it_tells_log_probabilities_of_every_token(client: FlaskClient) -> None:
    asked = {"prompt": "abc", "max_tokens": 4, "logprobs": 3, "echo": True}
    told = client.post("/v1/completions", json=asked).get_json()["choices"][0]["logprobs"]
    assert len(told["tokens"]) == 7
    assert told["token_logprobs"][0] is None
    assert len(set(told["token_logprobs"][1:])) == 1
    assert all(len(top) == 3 for top in told["top_logprobs"][3:])
    asked = {"inputs": "abc", "parameters": {"max_new_tokens": 4, "decoder_input_details": True}}
    details = client.post("/generate", json=asked).get_json()["details"]
    assert [len(details["prefill"]), len(details["tokens"])] == [3, 4]


def test_a_token_of_a_stream_is_a_piece_of_text(client: FlaskClient) -> None:
    reply = client.post("/generate_stream", json={"inputs": "x", "parameters": {"max_new_tokens": 9}})
    events = [json.loads(line[5:]) for line in reply.text.splitlines() if line.startswith("data:")]
    assert [len(event["token"]["text"]) for event in events] == [1] * 9


def test_it_stands_for_the_model_of_an_agent(bytes_alone: None) -> None:
    app = create_app(Config(policy="dynamic", model=FAST, mock_context=32768, served_names="claude-x"))
    start(app).join()
    client = app.test_client()

    def answer(**fields: Any) -> dict[str, Any]:
        asked = {"model": "claude-x", "max_tokens": 32000, "messages": [{"role": "user", "content": "Hi"}], **fields}
        reply = client.post("/v1/messages", json=asked)
        assert reply.status_code == 200, reply.text
        return dict(reply.get_json())

    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    tools = [{"name": "read", "description": "x" * 17000, "input_schema": schema}]
    called = answer(tools=tools)
    (call,) = called["content"]
    assert (call["name"], call["input"], called["stop_reason"]) == ("read", {"path": "word"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "ok"}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    last = answer(tools=tools, messages=turns)
    assert (last["content"], last["stop_reason"]) == ([{"type": "text", "text": "Done."}], "end_turn")
    assert last["usage"]["input_tokens"] + last["usage"]["cache_read_input_tokens"] > 17000
    endless = answer(max_tokens=10**6)
    assert (endless["stop_reason"], endless["usage"]["output_tokens"]) == ("end_turn", mock.ANSWER + 1)
    app.extensions["service"].stop()


def test_the_worker_needs_no_torch() -> None:
    """What gunicorn's worker does, in a process of its own, where torch cannot be imported."""
    code = f"""
import sys
sys.modules["torch"] = sys.modules["triton"] = None
import app, config
served = app.create_app(config.Config(policy="dynamic", model={FAST!r}))
app.start(served).join()
client = served.test_client()
for path, body in [
    ("/inference", {{"prompt": "hi", "num_tokens": 3}}),
    ("/v1/completions", {{"prompt": "hi", "max_tokens": 3, "logprobs": 2, "stop": "x", "stream": True}}),
    ("/generate", {{"inputs": "hi", "parameters": {{"max_new_tokens": 3}}}}),
]:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
assert client.put("/policy", json={{"policy": "static"}}).status_code == 200
for path in ("/stats", "/metrics", "/slots", "/info", "/openapi.json"):
    assert client.get(path).status_code == 200, path
served.extensions["service"].stop()
print("transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.stdout == "False\n", done.stderr


def test_pages_hold_two_contexts_a_slot_or_what_the_memory_does() -> None:
    assert mock.kv_pages(mock.GPT2, 0, 3) == 3 * 2 * 64 + 1
    assert mock.kv_pages(mock.GPT2, 1024 * mock.GPT2.kv_bytes, 3) == 64 + 1
    assert mock.kv_pages(Sizes(8192, 49152, 23040), 2 * 8192 * 23040, 3) == 2 * 512 + 1
    with pytest.raises(ValueError, match=r"--kv-memory is 5 bytes.* Set it to 100,663,296 at least"):
        mock.kv_pages(mock.GPT2, 5, 3)


def test_names_of_files_mean_the_same_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    here = str(Path.cwd())
    moved = with_absolute_paths(Config(policy="mine.py+sjf", model="mock:cost.json@10"))
    assert (moved.policy, moved.model) == (f"{here}/mine.py+sjf", f"mock:{here}/cost.json@10.0")
    same = Config(policy="dynamic+sjf", model="mock:llm-mock")
    assert with_absolute_paths(same) == same


def test_a_name_that_means_nothing_is_refused_at_the_start(tmp_path: Path) -> None:
    wrong = run_app("dynamic", "--port", str(free_port()), "--model", "mock:llm-moc")
    assert wrong.returncode == 2
    assert "Did you mean 'llm-mock'?" in wrong.stderr
    wrong = run_app("dynamic", "--port", str(free_port()), "--model", f"mock:{tmp_path}/none.json")
    assert wrong.returncode == 2
    assert "./eb simulate calibrate" in wrong.stderr


@pytest.mark.process
def test_a_calibrated_file_is_served_at_its_pace(tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text(json.dumps({"cost": to_dict(Affine(base=0.02))}))
    (tmp_path / "torch.py").write_text("raise ImportError('not installed')")
    log = tmp_path / "log"
    with Server(log, "dynamic", "--model", f"mock:{tmp_path}/cost.json", PYTHONPATH=str(tmp_path)) as server:
        began = time.perf_counter()
        answers = server.burst([{"prompt": f"{i}", "num_tokens": 25} for i in range(8)])
        took = time.perf_counter() - began
        assert [answer.status for answer in answers] == [200] * 8
        assert took + 0.02 >= 25 * 0.02  # the first may find a step under way
        assert server.get("/stats").json["engine"]["model"] == "mock:cost.json"
        text = server.output()
    assert "There is no model: words are drawn at random; times are those of the cost model cost.json" in text


@pytest.mark.full
@pytest.mark.process
def test_llm_mocks_benchmark_is_reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More slots, more throughput and an earlier first token: real clients, a real server, a fiftieth of the time."""
    monkeypatch.setattr(compare, "SIMULATOR", Path("not here"))
    what = [f"dynamic --max-batch-size {slots}" for slots in (1, 8)]
    load = ["--load", "burst", "--numsamples", "12", "--seed", "1", "--no-plots"]
    model = ["--model", "mock:llm-mock@50", "--name", "small", "--out", str(tmp_path)]
    assert compare.main([*what, *load, *model]) == 0
    runs = json.loads((tmp_path / "small" / "summary.json").read_text())["runs"]
    one, eight = runs
    assert eight["output_throughput"] > one["output_throughput"]
    assert eight["p99_ttft_ms"] < one["p99_ttft_ms"]

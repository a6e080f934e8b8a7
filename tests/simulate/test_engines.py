"""The schedulers of other servers, step by step against cases worked out by hand, and what servers say of themselves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from client.send import ask
from costs.cost import Affine, Host
from scheduling.sequence import Sequence
from simulate.engines import known
from simulate.laws.check import check
from simulate.scenario import Chosen, EngineSize
from simulate.simulator import Run, simulate
from tests.support import sample

SECOND = Affine(base=1.0)  # every step takes one second
FOUR = EngineSize(4)
OWN = ("vllm", "sglang")


def serve(
    name: str, requests: list[tuple[float, int, int]], engine: EngineSize = FOUR, *, fast: bool = True,
    cost: Affine = SECOND, records: bool = True, **options: object,
) -> Run:  # fmt: skip
    """Serve requests of (arrival, prompt, answer), named a, b, ..."""
    sequences = [
        Sequence([i + 1] * prompt, answer, id=chr(97 + i), arrived_at=at)
        for i, (at, prompt, answer) in enumerate(requests)
    ]
    chosen = Chosen(f"simulate.engines.{name}" if name.partition("+")[0] in OWN else name, options)
    return simulate(engine.scheduler(chosen), sequences, cost, Host(), records=records, fast_forward=fast)


def tokens(run: Run) -> list[dict[str, int]]:
    """Return what each request computes in each step."""
    return [{member.id: member.tokens for member in step.members if member.tokens} for step in run.iterations]


@pytest.mark.parametrize("overlap", [True, False])
def test_vllm_cuts_a_prompt_of_5000_tokens_into_steps_of_2048(overlap: bool) -> None:
    assert tokens(serve("vllm", [(0, 5000, 2)], overlap=overlap)) == [{"a": 2048}, {"a": 2048}, {"a": 904}, {"a": 1}]


def test_vllm_computes_decodes_before_the_rest_of_a_prompt() -> None:
    steps = tokens(serve("vllm", [(0, 10, 4), (0.5, 150, 1)], EngineSize(4, 100), overlap=False))
    assert steps == [{"a": 10}, {"a": 1, "b": 99}, {"a": 1, "b": 51}, {"a": 1}]


def test_with_overlap_a_request_joins_two_steps_after_the_one_in_which_it_arrived() -> None:
    requests = [(0.0, 10, 9), (2.5, 10, 1)]
    joined = {
        on: [k for k, step in enumerate(tokens(serve("vllm", requests, overlap=on))) if "b" in step] for on in (0, 1)
    }
    assert joined == {0: [3], 1: [4]}


def test_with_overlap_a_slot_is_taken_two_steps_after_the_last_one_of_its_request() -> None:
    requests = [(0.0, 10, 2), (0.0, 10, 9), (0.1, 10, 1)]
    free = {
        on: [k for k, step in enumerate(tokens(serve("vllm", requests, EngineSize(2), overlap=on))) if "c" in step]
        for on in (0, 1)
    }
    assert free == {0: [2], 1: [3]}


def test_vllm_preempts_the_last_to_join_and_lets_no_other_join_in_that_step() -> None:
    engine = EngineSize(8, kv_tokens=80, prefix_cache=False)  # five pages of 16
    run = serve("vllm", [(0, 30, 20), (0, 30, 20), (0.5, 5, 2)], engine, overlap=False)
    preempting = [k for k, step in enumerate(run.iterations) if step.preempted]
    assert run.iterations[preempting[0]].preempted == ["c", "b"]  # a takes the page of c; then b is the last
    assert all(not run.iterations[k].joined for k in preempting)
    assert {seq.id: seq.preemptions for seq in run.sequences}["a"] == 0


def test_vllm_takes_pages_as_they_are_needed() -> None:
    run = serve("vllm", [(0, 16, 100)], EngineSize(1, kv_tokens=160))
    assert [run.iterations[k].pages_used for k in (0, 40)] == [2, 4]


def test_sglang_computes_no_decode_in_a_step_with_prompts() -> None:
    steps = tokens(serve("sglang", [(0, 10, 4), (0.5, 150, 2)], EngineSize(4, 100), overlap=False))
    assert steps == [{"a": 10}, {"b": 100}, {"b": 50}, {"a": 1, "b": 1}, {"a": 1}, {"a": 1}]


@pytest.mark.parametrize(("prompt", "joins"), [(458, True), (459, False)])
def test_sglang_admits_by_what_is_free_less_a_part_of_what_is_to_come(prompt: int, joins: bool) -> None:
    # Of 1,000 tokens, a holds 102: its prompt, one token, and that of the next step. It may generate 399 more, of which 0.098
    # count: 898 - 39.1 = 858.9 are left for the prompt of b and its answer of 400.
    engine = EngineSize(4, kv_tokens=1000, page_size=1, prefix_cache=False)
    steps = tokens(serve("sglang", [(0, 100, 400), (0.5, prompt, 400)], engine, overlap=False))
    assert ("b" in steps[1]) is joins


def test_sglang_retracts_the_request_with_the_fewest_tokens() -> None:
    engine = EngineSize(4, kv_tokens=350, page_size=1, prefix_cache=False)
    run = serve("sglang", [(0, 10, 200), (30, 100, 200)], engine, conservativeness=0.0)
    assert {seq.id: seq.preemptions > 0 for seq in run.sequences} == {"a": False, "b": True}


def test_triton_sets_memory_for_whole_answers_aside() -> None:
    policy, engine, _ = known.get("triton").serve({"kv_tokens": 160}, {"page_size": 16})
    assert tokens(serve(policy.name, [(0, 30, 100), (0, 30, 100)], engine, **policy.options))[0] == {"a": 30}


def test_llama_cpp_fills_a_step_with_prompts_after_the_decodes() -> None:
    policy, engine, _ = known.get("llama.cpp").serve({"slots": 3}, {"tokens_per_step": 100})
    steps = tokens(serve(policy.name, [(0, 10, 4), (0.5, 150, 2), (0.5, 60, 1), (0.5, 9, 1)], engine, **policy.options))
    assert steps == [{"a": 10}, {"a": 1, "b": 99}, {"a": 1, "b": 51, "c": 48}, {"a": 1, "b": 1, "c": 12}, {"d": 9}]


def test_tgi_lets_requests_join_when_enough_wait_and_pauses_decodes_for_their_prompts() -> None:
    policy, engine, _ = known.get("tgi").serve({"ratio": 1.0, "max_waiting": 100}, {})
    steps = tokens(serve(policy.name, [(0, 10, 5), (0, 10, 5), (1.5, 7, 1), (2.5, 8, 1)], engine, **policy.options))
    both = {"a": 1, "b": 1}
    assert steps == [{"a": 10, "b": 10}, both, both, {"c": 7, "d": 8}, both, both]


@pytest.mark.parametrize("name", OWN)
def test_an_engine_keeps_the_laws(name: str) -> None:
    verdict = check(f"simulate.engines.{name}", cases=sample(150), large=sample(1))
    assert verdict.broken is None, str(verdict)


@pytest.mark.parametrize("kv_tokens", [0, 3000])
@pytest.mark.parametrize("slots", [6, 40])
@pytest.mark.parametrize("name", [*OWN, "vllm+sjf"])
def test_steps_in_which_nothing_changes_pass_at_once_with_the_same_result(
    name: str, slots: int, kv_tokens: int
) -> None:
    requests = [(0.37 * i, 50 + 37 * i % 400, 20 + 53 * i % 300) for i in range(60)]
    cost = Affine(base=0.02, prefill=0.01, token=1e-4, context=1e-7)
    engine = EngineSize(slots, 512, kv_tokens)
    runs = [serve(name, requests, engine, fast=fast, cost=cost, records=False) for fast in (False, True)]
    slow, quick = (
        [(s.scheduled_at, s.first_token_at, s.finished_at, s.preemptions) for s in run.sequences] for run in runs
    )
    assert slow == quick
    assert runs[0].steps == runs[1].steps


def test_steps_pass_at_once_while_a_request_waits_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {}
    for name in OWN:
        scheduler = EngineSize(4, kv_tokens=1600).scheduler(Chosen(f"simulate.engines.{name}"))
        planned: list[float] = []
        monkeypatch.setattr(scheduler, "plan", lambda now, plan=scheduler.plan, to=planned: to.append(now) or plan(now))
        run = simulate(scheduler, [Sequence([i] * 700, 300, id=str(i)) for i in (1, 2, 3)], SECOND)
        plans[name] = (len(planned), run.steps)
    assert all(count < steps / 5 for count, steps in plans.values()), plans


@pytest.mark.parametrize("name", known.names())
def test_every_kind_has_a_policy_that_can_be_made_and_flags_for_its_settings(name: str) -> None:
    kind = known.get(name)
    chosen, engine, sources = kind.serve({}, {})
    assert chosen.policy(engine.slots).max_batch_size == engine.slots
    assert set(sources.values()) == {"usual"}
    assert {flag for flag in kind.flags if ":" not in flag} <= {*sources, "policy", "loop"}


def test_settings_are_from_options_before_the_log_before_what_is_usual() -> None:
    facts = {"slots": 128, "tokens_per_step": 4096, "overlap": "off", "prefix_cache": "False", "page_size": "many"}
    chosen, engine, sources = known.get("vllm").serve(facts, {"slots": 64})
    assert (engine.slots, engine.tokens_per_step, engine.prefix_cache, engine.page_size) == (64, 4096, False, 16)
    assert chosen.options == {"overlap": False}
    assert sources == {
        "slots": "option", "tokens_per_step": "log", "kv_tokens": "usual", "page_size": "usual", "prefix_cache": "log",
        "overlap": "log",
    }  # fmt: skip


def test_a_block_of_vllm_is_never_used() -> None:
    assert known.get("vllm").serve({"kv_tokens": 2588 * 16}, {})[1].kv_tokens == 2587 * 16


def test_our_server_says_which_policy_it_runs() -> None:
    facts = {"policy": "dynamic+sjf", "policy_options": {"reserve": "prompt"}}
    chosen, _, sources = known.get("ours").serve(facts, {})
    assert (chosen.name, chosen.options["reserve"], sources["reserve"]) == ("dynamic+sjf", "prompt", "log")


def test_a_log_cannot_name_a_file_that_is_then_run(tmp_path: Any) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("raise SystemExit('it was run')")
    assert known.get("ours").serve({"policy": str(mine)}, {})[0].name == "dynamic"


@pytest.mark.parametrize(
    "given", [{"slots": 0}, {"kv_tokens": -1}, {"overlap": "perhaps"}, {"tokens_per_step": True}, {"overlpa": 1}]
)
def test_a_wrong_option_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|Did you mean 'overlap'"):
        known.get("vllm").serve({}, given)


def test_an_unknown_engine_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="Did you mean 'sglang'"):
        known.get("sglan")


@contextmanager
def server(answers: dict[str, Any], slowly: float = 0.0) -> Iterator[tuple[str, list[str]]]:
    """Serve answers by path on loopback: bytes, JSON, or a whole (status, headers, body); yield the URL and the paths seen."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            answer = answers.get(self.path, (404, {}, b"{}"))
            if not isinstance(answer, tuple):
                answer = (200, {}, answer if isinstance(answer, bytes) else json.dumps(answer).encode())
            status, headers, body = answer
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for i in range(0, len(body), 1 if slowly else 1 << 16):
                    self.wfile.write(body[i : i + (1 if slowly else 1 << 16)])
                    time.sleep(slowly)
            except OSError:  # the client has enough
                pass

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}", seen
        finally:
            http.shutdown()
            thread.join()


METRICS = b"""# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="2588",sliding_window="None"} 1.0
vllm:num_requests_running{engine="0"} 0.0
"""
STATS = {"policy": "chunked", "engine": {
    "model": "smollm2", "max_batch_size": 64, "max_tokens_per_step": 256, "policy_options": {"max_batched_tokens": 128},
    "kv": {"pages_total": 100, "page_size": 16}}}  # fmt: skip
SGLANG = {
    "max_running_requests": None, "internal_states": [{"effective_max_running_requests_per_dp": 48}], "version": "0.5.6",
    "chunked_prefill_size": 2048, "max_total_num_tokens": 20480, "disable_radix_cache": False, "disable_overlap_schedule": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"/stats": STATS, "/info": {"max_batch_total_tokens": 5}},
         {"engine": "ours", "slots": 64, "tokens_per_step": 256, "policy": "chunked", "page_size": 16, "kv_tokens": 1600,
          "policy_options": {"max_batched_tokens": 128}, "model": "smollm2"}),
        ({"/metrics": METRICS, "/version": {"version": "0.19.0"}, "/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]}},
         {"engine": "vllm", "kv_tokens": 2588 * 16, "page_size": "16", "prefix_cache": "True", "version": "0.19.0", "model": "m",
          "context": 4096}),
        ({"/metrics": METRICS, "/server_info?config_format=json": {"vllm_config": {"scheduler_config": {"max_num_seqs": 96}}}},
         {"engine": "vllm", "kv_tokens": 2588 * 16, "page_size": "16", "prefix_cache": "True", "slots": 96}),
        ({"/metrics": METRICS},
         {"engine": "vllm", "kv_tokens": 2588 * 16, "page_size": "16", "prefix_cache": "True"}),
        ({"/get_server_info": SGLANG},
         {"engine": "sglang", "slots": 48, "tokens_per_step": 2048, "kv_tokens": 20480, "prefix_cache": True, "overlap": False,
          "version": "0.5.6"}),
        ({"/props": {"total_slots": 4, "default_generation_settings": {"n_ctx": 8192}, "build_info": "b8681"}},
         {"engine": "llama.cpp", "slots": 4, "kv_tokens": 32768, "version": "b8681"}),
        ({"/info": {"max_batch_total_tokens": 32000, "max_batch_size": None, "waiting_served_ratio": 0.3, "version": "2.4.1"}},
         {"engine": "tgi", "kv_tokens": 32000, "ratio": 0.3, "version": "2.4.1"}),
        ({"/v2": {"name": "triton", "version": "2.60.0"}}, {"engine": "triton", "version": "2.60.0"}),
        ({}, {}),
    ],
)  # fmt: skip
def test_a_server_says_which_engine_it_is_and_how_it_is_set(answers: dict[str, Any], expected: dict[str, Any]) -> None:
    with server(answers) as (url, seen):
        found = ask.facts(f"{url}/v1/", timeout=60)
        assert [line.split()[1] for line in found.pop("asked")] == [f"{url}{path}:" for path in seen]
    assert found == expected
    if found:
        kind = known.get(found["engine"])
        assert kind.serve(found, {})[1].kv_tokens == max(0, found.get("kv_tokens", 0) - 16 * kind.spare_pages)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>vllm max_batch_size</html>", b"[" * 100_000, b"\xff\xfe\x00", b"null", b"[1]", b'"max_batch_size"',
        b'{"total_slots": {"a": []}}', b'{"max_total_num_tokens": "many", "internal_states": 3}', b"9" * 5000,
        b'{"max_batch_size": 1, "engine": [], "policy": {}}', b'vllm:cache_config_info{num_gpu_blocks="None",block_size="x"',
        b" " * (5 << 20),
    ],
)  # fmt: skip
def test_odd_answers_raise_nothing(body: bytes) -> None:
    paths = ("stats", "metrics", "server_info", "get_server_info", "props", "info", "v2", "version", "v1/models")
    with server({f"/{path}": body for path in paths}) as (url, _):
        found = ask.facts(url)
    assert found["asked"]
    known.get(found.get("engine", "vllm")).serve(found, {})


def test_a_redirect_to_another_host_is_not_followed() -> None:
    with server({"/stats": STATS}) as (other, seen):
        with server({"/stats": (302, {"Location": f"{other}/stats"}, b"")}) as (url, _):
            assert set(ask.facts(url, timeout=60)) == {"asked"}
        assert seen == []


def test_a_server_that_does_not_answer_is_asked_once() -> None:
    with server({"/stats": json.dumps(STATS).encode()}, slowly=0.5) as (url, _):
        assert len(ask.facts(url, timeout=0.1)["asked"]) == 1


def test_a_url_at_which_nothing_listens_raises_nothing() -> None:
    assert set(ask.facts("http://127.0.0.1:9", timeout=0.5)) == {"asked"}
    assert set(ask.facts("no url")) == {"asked"}

"""E: what breaks in a step, beside it, or for good; each fault waits for a prompt that has its name."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from cases_prompt import NEIGHBOURS, neighbours
from harness import SLOTS, Setting, Watched
from table import LOOPS, Case, body, text_of

from tests.support import wait_until
from tests.support.servers import Answer

ARMED = Setting(
    faults={
        "poison": {"prompt_contains": "POISON"},
        "fail_once": {"prompt_contains": "ONCE"},
        "oom_for": {"prompt_contains": "HUGE"},
        "nan_row": {"prompt_contains": "NOTNUM"},
        "bad_detokenize": {"prompt_contains": "GARBLED"},
        "sticky": {"prompt_contains": "STICKY"},
        "raise_in_loop": {"prompt_contains": "LEAVE"},
        "slow_step": {"ms": 100, "prompt_contains": "SLOWLY"},
    },
    first=(body("/inference", "POISON"), body("/inference", "GARBLED")),
    mock=True,
)
COMPUTING = replace(ARMED, faults={**ARMED.faults, "slow_step": {"ms": 2}}, mock=False)
NO_SINKS = Setting(faults={"sink": {"does": "raise"}}, mock=True)
BLOCKED_SINKS = Setting(faults={"sink": {"does": "block"}})
HANGING = Setting(faults={"hang_loop": {"prompt_contains": "HANG"}, "stall_seconds": 2})
HOLDING = Setting(
    faults={"hold_gil": {"prompt_contains": "HOLD", "seconds": 60}}, environment={"GUNICORN_CMD_ARGS": "--timeout 3"}
)
# Five starts must fit into a minute, on a busy machine too: a mock model needs no torch for them.
FAILING = Setting(faults={"fail_always": {"prompt_contains": "ALWAYS"}}, mock=True)
DIALECTS = {"/inference": 500, "/v1/completions": 500, "/generate": 424}


def beside_neighbours(server: Watched, act: Callable[[], None]) -> None:
    """Do it while seven others run, who must be told what they are told without it."""
    alone = neighbours(server)
    with ThreadPoolExecutor(1) as pool:
        together = pool.submit(neighbours, server)
        wait_until(lambda: together.done() or server.figures()["requests-running"] >= min(server.slots, 2))
        act()
        assert together.result() == alone


def one_fails_alone(server: Watched) -> None:
    """About 2 log2(8) further steps find the culprit, and no neighbour hears of it."""

    def act() -> None:
        for words in ("POISON", "NOTNUM", "GARBLED"):
            for path, code in DIALECTS.items():
                answer = server.ask(path, body(path, f"the {words}"))
                assert answer.status == code, (words, path, answer.body)

    beside_neighbours(server, act)


def a_stream_that_fails_has_no_done(server: Watched) -> None:
    answer = server.ask("/v1/completions", body("/v1/completions", "a POISON", stream=True))
    assert answer.status == 200
    assert b'"server_error"' in answer.body
    assert b"[DONE]" not in answer.body


def poison(server: Watched) -> None:
    one_fails_alone(server)
    a_stream_that_fails_has_no_done(server)


def once(server: Watched) -> None:
    path = "/inference"
    beside_neighbours(server, lambda: text_of(path, server.ask(path, body(path, "but ONCE"))) and None)


def too_large_alone(server: Watched) -> None:
    def act() -> None:
        for path in DIALECTS:
            answer = server.ask(path, body(path, "so HUGE"))
            assert answer.status == 503, answer.body
            assert "memory" in answer.body.decode()

    beside_neighbours(server, act)


def all_are_told_and_a_new_worker_comes(server: Watched, prompt: str) -> list[Answer]:
    """Send what kills the engine beside seven that run: nobody's connection may break."""
    before = server.worker
    sent = [*NEIGHBOURS, body("/inference", prompt)]
    with ThreadPoolExecutor(SLOTS) as pool:
        answers = list(pool.map(lambda each: server.ask("/inference", each), sent))
    wait_until(lambda: server.has_new_worker(before), 120)
    return answers


def dies(prompt: str) -> Callable[[Watched], None]:
    """Return the act that sends such a prompt: every request in flight is answered, and the server comes back."""

    def act(server: Watched) -> None:
        answers = all_are_told_and_a_new_worker_comes(server, prompt)
        assert {answer.status for answer in answers} <= {200, 503}
        assert answers[-1].status == 503
        assert all(int(a.headers["Retry-After"]) >= 1 for a in answers if a.status == 503)

    return act


def the_fifth_time_it_stops(server: Watched) -> None:
    """From the first such prompt on every step raises, in each new process again.

    Four times it starts anew; the fifth time within a minute it says in one sentence why it will not, and exits 3.
    """
    for _ in range(4):
        dies("ALWAYS")(server)
    answer = server.ask("/inference", body("/inference", "ALWAYS"))
    assert answer.status == 503
    assert server.process.wait(60) == 3
    said = [line for line in server.output().splitlines() if line.startswith("error: the engine")]
    assert len(said) == 6, said
    assert all("steps within 60 s" in line for line in said[:5])
    assert "failed 5 times within 60 s" in said[5]


def hang(server: Watched) -> None:
    seen: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.1):
            try:
                seen.append(server.get("/health").status)
            except OSError:
                seen.append(0)

    watch = threading.Thread(target=look)
    watch.start()
    try:
        dies("HANG")(server)
    finally:
        done.set()
        watch.join()
    assert 503 in seen
    assert "the batching loop has not" in server.output()
    assert re.search(r'File ".*faults\.py", line \d+ in hang', server.output()), "no stack of the loop"


def hold(server: Watched) -> None:
    before = server.worker
    sock = server.begin("/inference", body("/inference", "HOLD"))
    wait_until(lambda: server.has_new_worker(before), 60)
    sock.close()


def generates_all_the_same(server: Watched) -> None:
    assert neighbours(server) == neighbours(server)
    for path in ("/metrics", "/stats", "/health", "/slots"):
        assert server.ask(path, method="GET").status == 200


CASES = [
    Case("E1", "one that breaks the step it is in", poison, policies=LOOPS, setting=ARMED, tracebacks=True,
         tests=("tests/serving/test_failing_steps.py::test_a_request_that_breaks_a_batch_of_8_is_found_and_the_others_get_their_tokens",)),
    Case("E1", "one that breaks the step it is in, computed", poison, policies=LOOPS, setting=COMPUTING, quick=False, tracebacks=True),
    Case("E2", "a step that fails once", once, policies=LOOPS, setting=ARMED, tracebacks=True,
         tests=("tests/serving/test_failing_steps.py::test_a_step_that_fails_once_affects_no_request",)),
    Case("E2", "a computed step that fails once", once, setting=COMPUTING, quick=False, tracebacks=True),
    Case("E3", "an engine that breaks again and again", the_fifth_time_it_stops, setting=FAILING, quick=False,
         ends=True,
         tests=("tests/serving/test_recovery.py::test_an_engine_that_cannot_compute_ends_every_request_with_the_reason",
                "tests/serving/test_supervision.py::test_the_fifth_failure_within_a_minute_is_one_too_many")),
    Case("E4", "one that runs out of memory alone", too_large_alone, policies=LOOPS, setting=COMPUTING, quick=False, tracebacks=True),
    Case("E5", "a GPU that must be started anew", dies("STICKY"), setting=ARMED, killed=True, tracebacks=True),
    Case("E5", "a GPU that must be started anew, computing", dies("STICKY"), policies=LOOPS, setting=COMPUTING, quick=False,
         killed=True, tracebacks=True),
    Case("E5", "a loop that is left", dies("LEAVE"), setting=COMPUTING, quick=False, killed=True, tracebacks=True),
    Case("E6", "a loop that hangs", hang, setting=HANGING, quick=False, killed=True, tracebacks=True),
    Case("E7", "a loop that holds the interpreter", hold, setting=HOLDING, quick=False, killed=True,
         tracebacks=True),
    Case("E8", "sinks that raise", generates_all_the_same, setting=NO_SINKS, quick=False, tracebacks=True),
    Case("E8", "sinks that block", generates_all_the_same, setting=BLOCKED_SINKS, quick=False),
]  # fmt: skip

"""A record of vLLM shown by the server's own pages: one that is whole, grows, breaks off, or begins anew."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from werkzeug.serving import make_server

from client import switch
from client.report import receipt
from config import Config
from integrations.queue import watch
from integrations.queue.watch import Watch
from tests.integrations.vllm.small_vllm import request, small_vllm
from tests.support import ROOT, in_background, wait_until

LINES = (ROOT / "tests/data/vllm_record.jsonl").read_bytes().splitlines(keepends=True)
HEAD = json.loads(LINES[0])


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "record"


def watching(record: Path) -> Watch:
    return Watch(record, Config(policy="", host="127.0.0.1"))


def add(watch: Watch, record: Path, *lines: bytes | dict[str, Any]) -> None:
    """Append lines to the record, and have all of it taken in."""
    with record.open("ab") as file:
        file.writelines(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    take_in(watch)


def take_in(watch: Watch) -> None:
    for _ in range(2):  # a file that began anew is read at the next look
        watch.take_in()


def get(watch: Watch, path: str) -> Any:
    return watch.app.test_client().get(path).json


def events(watch: Watch) -> list[tuple[str, dict[str, Any]]]:
    """Return the entries of the feed, as pages get them."""
    return [(one.kind, json.loads(one.frame.split(b"data: ")[1])) for one in watch._service.feed.entries()]


@contextmanager
def following(watch: Watch) -> Iterator[None]:
    """Take in the record in a thread until the end of the block."""
    over = threading.Event()

    def follow() -> None:
        while not over.wait(0.01):
            watch.take_in()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_whole_record_becomes_the_steps_and_figures_of_a_server(record: Path) -> None:
    watch = watching(record)
    add(watch, record, *LINES)
    theirs = [line for line in map(json.loads, LINES) if "members" in line]
    ours = [value for kind, value in events(watch) if kind == "step"]
    same = ("n", "members", "joined", "left", "pages", "queue", "policy")
    assert [[one[name] for name in same] for one in ours] == [[one[name] for name in same] for one in theirs]
    ends = [one["t"] + one["seconds"] for one in ours]
    assert all(one["t"] >= end - 1e-5 for one, end in zip(ours[1:], ends))  # the second begins as the first ends
    assert sum(one["seconds"] for one in ours) < sum(one["seconds"] for one in theirs)
    stats = get(watch, "/stats")
    assert (stats["requests"], stats["requests-cancelled"], stats["total-tokens-handled"]) == (4, 1, 16)
    assert (stats["policy"], stats["engine"]["iterations"], stats["requests-waiting"]) == ("dynamic+sjf", 11, 0)
    timeline = get(watch, "/requests/r0")
    assert (timeline["state"], timeline["prompt_tokens"], timeline["output_tokens"]) == ("finished", 40, 6)
    assert timeline["arrived_at"] < timeline["scheduled_at"] < timeline["first_token_at"] < timeline["finished_at"]


def test_what_grows_is_shown_line_by_line_and_half_a_line_once_it_is_whole(record: Path) -> None:
    watch = watching(record)
    assert get(watch, "/health")["status"] == "loading"
    take_in(watch)  # there is no file yet
    add(watch, record, *LINES[:6], LINES[6][:50])
    assert [slot["id_task"] for slot in get(watch, "/slots")] == ["r0", "r1"]
    assert (watch.running, watch.waiting) == (2, 1)
    assert (get(watch, "/health")["status"], watch._number) == ("ok", 2)
    add(watch, record, LINES[6][50:], *LINES[7:9])
    assert (watch._number, watch.waiting) == (3, 3)


def test_the_page_and_its_files_are_served_and_what_computes_is_not(record: Path) -> None:
    watch = watching(record)
    add(watch, record, *LINES)
    client = watch.app.test_client()
    assert b"<html" in client.get("/", headers={"Accept": "text/html"}).data
    for method, path in (("POST", "/inference"), ("POST", "/load"), ("DELETE", "/requests/r0")):
        answer = client.open(path, method=method, json={})
        assert answer.status_code == 404
        assert "vLLM itself" in answer.json["error"]["message"]
    for path in ("/metrics", "/load", "/ready", "/stats/token_data.csv"):
        assert client.get(path).status_code == 200
    stream = client.get("/events?detail=1&last=1")
    frames = b"".join(part for _, part in zip(range(2), stream.response))
    stream.close()
    assert b"event: state" in frames
    assert b"id: 11" in frames


@pytest.mark.parametrize("is_new_file", [True, False])
def test_after_a_restart_of_vllm_steps_go_on_and_its_old_requests_have_left(is_new_file: bool, record: Path) -> None:
    watch = watching(record)
    add(watch, record, *LINES[:6])
    assert watch.running == 2
    if is_new_file:
        record.unlink()
        take_in(watch)
    head = HEAD | {"policy": "/home/me/mine.py+sjf", "slots": 3}
    record.write_bytes(json.dumps(head).encode() + b"\n" + b"".join(LINES[1:4]))
    take_in(watch)
    assert (watch.running, watch.waiting, watch._number, watch.slots) == (1, 1, 3, 3)
    assert watch.policy_name == "mine.py+sjf"  # and the file was not run
    assert [value["id"] for kind, value in events(watch) if kind == "departure"] == ["r0", "r1", "r2"]


def test_lines_that_are_no_record_and_rows_that_never_arrived_do_no_harm(record: Path) -> None:
    watch = watching(record)
    without = [line for line in LINES if b'"arrive":"r0"' not in line]
    broken = (b"{\n", b"[1]\n", b'{"n": 1, "members": [{}]}\n', b"\xff\n", b'{"cancel": "r9"}\n', b"[" * 100_000 + b"\n",
              b'{"n": 1, "members": [], "t": 0.5, "seconds": 1' + b"0" * 400 + b"}\n")  # fmt: skip
    add(watch, record, *broken, *without[:5], *broken, *without[5:])
    assert get(watch, "/stats")["requests"] == 3
    assert (watch._number, watch.running, watch.waiting) == (11, 0, 0)


def test_a_switch_is_written_for_vllm_and_answered_when_the_record_has_it(record: Path) -> None:
    watch = watching(record)
    add(watch, record, *LINES[:6])
    answers: list[Any] = []

    def switch() -> None:
        answers.append(watch.app.test_client().put("/policy", json={"policy": "dynamic+vtc", "options": {"w_q": 3}}))

    thread = threading.Thread(target=switch)
    with pytest.MonkeyPatch.context() as patched, following(watch):
        patched.setattr("integrations.queue.watch.SWITCH_SECONDS", 60.0)
        thread.start()
        wish = Path(f"{record}.policy")
        wait_until(wish.exists)
        wanted = json.loads(wish.read_text("utf-8"))
        assert (wanted["policy"], wanted["options"]["w_q"], answers) == ("dynamic+vtc", 3, [])
        with record.open("ab") as file:
            file.write(json.dumps({"switch": HEAD | wanted, "now": 0.0}).encode() + b"\n")
        thread.join(60)
    assert answers[0].json["policy"] == "dynamic+vtc"
    assert ("policy", "dynamic+vtc") in [(kind, value.get("policy")) for kind, value in events(watch)]


def test_a_vllm_without_requests_is_said_not_to_have_switched(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SWITCH_SECONDS", 0.0)
    shown = watching(record)
    add(shown, record, *LINES)
    client = shown.app.test_client()
    answer = client.put("/policy", json={"policy": "dynamic+vtc"})
    assert (answer.status_code, shown.policy_name) == (504, "dynamic+sjf")
    assert "next step" in answer.json["error"]["message"]
    assert client.put("/policy", json={"policy": "/tmp/mine.py"}).status_code == 400
    leased = client.put("/policy", json={"policy": "dynamic+vtc", "for_s": 20})
    assert (leased.status_code, "Send it requests" in leased.json["error"]["message"]) == (504, True)
    assert not Path(f"{record}.policy").exists()  # the wish is withdrawn
    assert client.delete("/policy/lease").status_code == 200  # there is none
    assert {one["policy"] for one in client.get("/served").json["ended"]} == {"dynamic+sjf"}


def run(overlaps: bool, policy: str = "dynamic") -> list[dict[str, Any]]:
    """Return a record of an old run: two slots, six requests one after another, and answers of four tokens in four steps."""
    lines: list[dict[str, Any]] = [HEAD | {"policy": policy}]
    for i in range(6):
        id, at = f"r{i}", float(10 + i)
        hints = {"max_tokens": 4, "client": "ab"[i % 2], "deadline": at + 9, "program": "", "pages": [7]}
        lines.append({"arrive": id, "before": 4 * i + 1, "now": at, "at": at, "prompt": 20, **hints})
        for k in range(4):
            member = {
                "id": id,
                "slot": 0,
                "phase": "decode" if k else "prefill",
                "tokens": 1 if k else 20,
                "computed": 20 + k,
                "total": 24,
            }
            early = 0.05 if overlaps and k else 0.0  # it is planned when the step before it begins
            lines.append({
                "n": 4 * i + k + 1, "t": at + 0.05 * k - early, "seconds": 0.05 + early, "policy": policy, "queue": 0, "members": [member],
                "joined": [] if k else [id], "left": [{"id": id, "reason": "length"}] if k == 3 else [], "pages": {"used": 2, "total": 5},
                "slot_steps": {"useful": 1.0, "idle": 1.0}, "outputs": {id: 4} if k == 3 else {},
            })  # fmt: skip
    return lines


@pytest.mark.process
@pytest.mark.parametrize("overlaps", [True, False])
def test_other_policies_are_simulated_on_the_requests_and_step_times_of_a_record(overlaps: bool, record: Path) -> None:
    shown = watching(record)
    add(shown, record, *run(overlaps))
    client = shown.app.test_client()
    answer = client.post("/what-if", json={"policies": ["dynamic+sjf"]}).json
    assert [lane["policy"] for lane in answer["lanes"]] == ["dynamic", "dynamic", "dynamic+sjf"]
    for lane in answer["lanes"]:  # each request has the loop for itself, for four steps
        assert lane["latency_mean_s"] == pytest.approx(0.2, abs=1e-3)
    blame = client.get("/requests/r3/blame").json
    assert (blame["trusted"], blame["client"], blame["others"]) == (True, "b", [])
    assert shown._questions.late is overlaps


def test_too_little_and_a_policy_from_a_file_are_refused_with_the_reason(record: Path) -> None:
    shown = watching(record)
    client = shown.app.test_client()
    assert client.post("/what-if", json={}).status_code == 503  # vLLM has not started
    add(shown, record, *LINES)
    few = client.post("/what-if", json={"policies": ["static"]})
    assert (few.status_code, "too little" in few.json["error"]["message"]) == (404, True)
    record.unlink()
    take_in(shown)
    add(shown, record, *run(overlaps=False, policy="/home/me/mine.py"))
    for reply in (client.post("/what-if", json={}), client.get("/requests/r3/blame")):
        assert (reply.status_code, "mine.py" in reply.json["error"]["message"]) == (404, True)


@pytest.mark.process
def test_an_experiment_in_vllm_ends_with_a_receipt(
    record: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "SWITCH_SECONDS", 60.0)
    shown, numbers = watching(record), itertools.count()
    with small_vllm() as adapter, following(shown):
        monkeypatch.setenv(adapter.SETTINGS, json.dumps({"policy": "dynamic+vtc", "record": str(record)}))
        vllm = adapter.PolicyScheduler(slots=4)
        own = vllm.plans.policy

        def serve(until: Callable[[], Any]) -> None:
            while not until():
                if len(vllm.requests) < 6:
                    i = next(numbers)
                    vllm.add_request(request(f"r{i}", tokens=4, client="ab"[i % 2]))
                vllm.update_from_output(vllm.schedule(), None)
                time.sleep(0.002)

        server = make_server("127.0.0.1", 0, shown.app, threaded=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        serve(lambda: get(shown, "/served").get("next", 0) > 200)
        command = [f"127.0.0.1:{server.port}", "dynamic", "dynamic+sjf", "--yes", "--window", "1", "--minutes", "0.1"]
        monkeypatch.setattr(receipt, "TELLING", 3)  # though they tell nothing
        with in_background(lambda: switch.main(command)) as codes:
            serve(lambda: codes)
        server.shutdown()
        thread.join()
        assert (codes, vllm.plans.policy) == ([0], own)
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert (found["done"], found["ended"], len(found["clients"])) == (3, "", 2)
    assert found["requests"] > 20
    # A simulation has the lowest priority.
    assert re.search("predicted change of E2E mean from dynamic to dynamic.sjf|no prediction: .*within", err)
    assert "Then dynamic+vtc serves again" in err

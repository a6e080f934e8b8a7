"""OpenAI's files and batches, as its official client sees them."""

from __future__ import annotations

import errno
import io
import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from calls import error, service
from flask import Flask
from openai_calls import official_client

from app import connect, create_app
from batch_files.lines import Limits
from batch_files.runner import Runner
from config import Config
from tests.support import wait_until
from tests.support.fakes import FakeModel, fake_engine

if TYPE_CHECKING:
    import openai

PATH = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, url: str = PATH, **body: Any) -> str:
    fields = {"prompt": "hi", "max_tokens": 2, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": fields})


def content(*lines: str) -> io.BytesIO:
    file = io.BytesIO("".join(f"{one}\n" for one in lines).encode())
    file.name = "requests.jsonl"
    return file


class World:
    """A server that can end and start again on the same folder."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.settings: dict[str, Any] = {"policy": "dynamic", "access_log": False, **settings}
        self.model = FakeModel()
        self.start()

    def start(self, connected: bool = True) -> None:
        self.app: Flask = create_app(Config(batch_folder=str(self.folder), **self.settings))
        self.engine = fake_engine(self.model)
        if connected:
            connect(service(self.app), self.engine)

    def stop(self) -> None:
        service(self.app).stop()
        self.engine.manager.stop()
        self.runner.stop(20)
        self.runner.store.close()

    @property
    def runner(self) -> Runner:
        found = service(self.app).batches
        assert found is not None
        return found

    def sdk(self, key: str = "one") -> openai.OpenAI:
        return official_client(self.app, key)

    def run(self, *lines: str, key: str = "one", **options: Any) -> Any:
        """Upload lines, start their batch, and return it."""
        sdk = self.sdk(key)
        file = sdk.files.create(file=content(*lines), purpose="batch")
        options = {"endpoint": PATH, "completion_window": "24h"} | options
        return sdk.batches.create(input_file_id=file.id, **options)

    def ended(self, id: str, key: str = "one") -> Any:
        sdk = self.sdk(key)
        wait_until(lambda: sdk.batches.retrieve(id).status in ENDED)
        return sdk.batches.retrieve(id)

    def rows(self, file: str | None, key: str = "one") -> list[dict[str, Any]]:
        return [] if file is None else [json.loads(one) for one in self.sdk(key).files.content(file).text.splitlines()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "batches")
    yield made
    made.stop()


def upload(world: World, data: bytes, name: str = "x.jsonl", **fields: str) -> Any:
    form = {"purpose": "batch", "file": (io.BytesIO(data), name), **fields}
    return world.app.test_client().post("/v1/files", data=form, content_type="multipart/form-data")


def test_the_official_client_uploads_runs_and_reads_a_batch(world: World) -> None:
    batch = world.run(*(line(f"r{i}") for i in range(20)), metadata={"name": "night"})
    assert batch.status in ("validating", "in_progress", "finalizing", "completed")
    done = world.ended(batch.id)
    assert (done.status, done.error_file_id, done.metadata) == ("completed", None, {"name": "night"})
    assert done.request_counts.to_dict() == {"total": 20, "completed": 20, "failed": 0}
    rows = world.rows(done.output_file_id)
    assert sorted(row["custom_id"] for row in rows) == sorted(f"r{i}" for i in range(20))
    assert {row["response"]["body"]["choices"][0]["text"] for row in rows} == {"ab"}
    assert {row["response"]["status_code"] for row in rows} == {200}
    assert done.in_progress_at <= done.finalizing_at <= done.completed_at <= done.expires_at
    files = {file.purpose: file for file in world.sdk().files.list()}
    assert (files["batch"].filename, set(files)) == ("requests.jsonl", {"batch", "batch_output"})
    assert [one.id for one in world.sdk().batches.list()] == [batch.id]


def test_chats_are_computed_too(world: World) -> None:
    path = "/v1/chat/completions"
    chat = {"custom_id": "c", "url": path, "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}}
    done = world.ended(world.run(json.dumps(chat), endpoint=path).id)
    (row,) = world.rows(done.output_file_id)
    assert row["response"]["body"]["choices"][0]["message"]["content"] == "abc"


def test_prompts_are_embedded(world: World) -> None:
    lines = [line(f"r{i}", "/v1/embeddings", input=["hi", "x" * i], prompt=None, max_tokens=None) for i in (3, 4)]
    done = world.ended(world.run(*lines, line("bad", "/v1/embeddings", input=""), endpoint="/v1/embeddings").id)
    assert (done.status, done.request_counts.failed) == ("completed", 1)
    rows = {row["custom_id"]: row["response"]["body"]["data"] for row in world.rows(done.output_file_id)}
    assert [rows[id][1]["embedding"][3] for id in ("r3", "r4")] == [3.0, 4.0]


def test_bad_lines_are_named_and_the_rest_is_computed(world: World) -> None:
    lines = [line("a"), "{", line("a"), line("b", temperature=9), line("c", url="/v1/chat/completions")]
    done = world.ended(world.run(*lines).id)
    assert done.status == "completed"
    assert done.request_counts.to_dict() == {"total": 5, "completed": 1, "failed": 4}
    errors = world.rows(done.error_file_id)
    assert {row["error"]["line"]: row["error"]["code"] for row in errors if row["error"]} == {
        2: "invalid_json_line", 3: "duplicate_custom_id", 5: "mismatched_url",
    }  # fmt: skip
    (refused,) = [row for row in errors if row["response"]]
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("b", 400)


@pytest.mark.parametrize(("lines", "code"), [(["{", "[]"], "invalid_json_line"), ([""], "empty_file")])
def test_a_file_without_a_good_line_fails_as_a_whole(world: World, lines: list[str], code: str) -> None:
    done = world.ended(world.run(*lines).id)
    assert done.status == "failed"
    assert done.errors.data[0].code == code


def test_a_cancelled_batch_keeps_what_was_computed(world: World) -> None:
    gate = threading.Event()

    def hold_long(plan: Any) -> None:
        if any(seq.max_tokens == 9 for seq in plan.sequences):
            assert gate.wait(60)

    world.model.before = hold_long
    batch = world.run(line("first"), line("long", max_tokens=9))
    sdk = world.sdk()
    wait_until(lambda: sdk.batches.retrieve(batch.id).status == "in_progress")
    assert sdk.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = world.ended(batch.id)
    gate.set()
    assert done.status == "cancelled"
    assert done.request_counts.completed == len(world.rows(done.output_file_id)) < 2
    assert sdk.batches.cancel(batch.id).status == "cancelled"
    wait_until(lambda: service(world.app).registry.open == 0)


def test_another_key_sees_neither_files_nor_batches(world: World) -> None:
    import openai

    done = world.ended(world.run(line("a")).id)
    other = world.sdk("two")
    assert list(other.files.list()) == list(other.batches.list()) == []
    for call in (
        lambda: other.files.retrieve(done.input_file_id), lambda: other.files.content(done.output_file_id),
        lambda: other.files.delete(done.input_file_id), lambda: other.batches.retrieve(done.id),
        lambda: other.batches.cancel(done.id),
        lambda: other.batches.create(input_file_id=done.input_file_id, endpoint=PATH, completion_window="24h"),
    ):  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            call()
    assert len(list(world.sdk().files.list())) == 2


def test_a_file_is_deleted_unless_a_batch_needs_it(world: World) -> None:
    import openai

    world.model.gate.clear()
    batch = world.run(line("a"))
    sdk = world.sdk()
    with pytest.raises(openai.BadRequestError):
        sdk.files.delete(batch.input_file_id)
    world.model.gate.set()
    done = world.ended(batch.id)
    assert sdk.files.delete(batch.input_file_id).deleted
    assert sdk.files.delete(done.output_file_id).deleted
    assert list(sdk.files.list()) == []
    assert list((world.folder / "files").iterdir()) == []


def test_a_restart_computes_the_rest_and_each_line_once(world: World) -> None:
    stopped = threading.Event()

    def wait_late(plan: Any) -> None:
        if world.model.plans > 30:
            assert stopped.wait(60)

    world.model.before = wait_late
    batch = world.run(*(line(f"r{i}") for i in range(200)))
    wait_until(lambda: world.model.plans > 30)
    stopping = threading.Thread(target=world.stop)
    stopping.start()
    stopped.set()
    stopping.join(60)
    files = [path for path in (world.folder / "files").iterdir() if path.name != batch.input_file_id]
    (kept,) = (path.read_text().count("\n") for path in files if path.stat().st_size)
    world.model = FakeModel()
    computed: set[str] = set()
    world.model.before = lambda plan: computed.update(seq.id for seq in plan.sequences)
    world.start()
    done = world.ended(batch.id)
    assert done.request_counts.to_dict() == {"total": 200, "completed": 200, "failed": 0}
    assert sorted(row["custom_id"] for row in world.rows(done.output_file_id)) == sorted(f"r{i}" for i in range(200))
    assert 0 < kept == 200 - len(computed)


def test_what_is_not_computed_in_time_expires_with_an_error_for_each_line(world: World) -> None:
    world.stop()
    world.start(connected=False)
    batch = world.run(line("a"), line("b"), completion_window="1h")
    world.runner.store._clock = lambda: batch.expires_at + 1.0
    connect(service(world.app), world.engine)
    done = world.ended(batch.id)
    assert done.status == "expired"
    assert [row["error"]["code"] for row in world.rows(done.error_file_id)] == ["batch_expired"] * 2


def test_files_are_kept_for_a_time(world: World) -> None:
    world.ended(world.run(line("a")).id)
    now = world.runner.store.now()
    assert world.runner.store.purge(now - 3600) == 0
    assert world.runner.store.purge(now + 1) == 3
    assert list(world.sdk().files.list()) == list(world.sdk().batches.list()) == []


def test_limits_on_files_and_lines(tmp_path: Path) -> None:
    world = World(tmp_path / "small", batch_file_size=1000, batch_files=2, batch_lines=3)
    client = world.app.test_client()
    error(upload(world, b"x" * 1001), 413)
    error(upload(world, b"x" * 100_000), 413)
    assert error(upload(world, b"x", purpose="fine-tune"))["param"] == "purpose"
    error(client.post("/v1/files", data={"purpose": "batch"}, content_type="multipart/form-data"))
    error(client.post("/v1/files", json={"purpose": "batch"}), 415)
    error(client.post("/v1/files", data=b"--b\r\n", content_type="multipart/form-data; boundary=b"))
    assert list((world.folder / "files").iterdir()) == []
    done = world.ended(world.run(*(line(f"{i}") for i in range(4))).id)
    assert (done.status, done.errors.data[0].code) == ("failed", "too_many_lines")
    assert upload(world, b"x").status_code == 200
    error(upload(world, b"x"), 429)
    world.stop()


def test_a_line_is_as_long_and_as_complex_as_a_body_may_be(world: World) -> None:
    nested = line("deep")[:-2] + ', "x": ' + "[" * 40 + "]" * 40 + "}}"
    many = line("many")[:-2] + ', "x": [' + "[]," * 20_000 + "[]]}}"
    done = world.ended(world.run(line("a"), line("long", prompt="x" * (1 << 20)), nested, many).id)
    errors = {row["error"]["line"]: row["error"]["code"] for row in world.rows(done.error_file_id)}
    assert errors == {2: "line_too_long", 3: "invalid_json_line", 4: "invalid_json_line"}
    assert done.request_counts.completed == 1


def test_blank_lines_count(tmp_path: Path) -> None:
    world = World(tmp_path / "small", batch_lines=3)
    for blank, status in (("\n", "completed"), ("\n\n\n", "failed")):
        assert world.ended(world.run(blank + line("a")).id).status == status
    world.stop()


def test_a_byte_order_mark_is_no_part_of_a_line(world: World) -> None:
    data = b"\xef\xbb\xbf" + line("a").encode()
    sent = world.sdk().files.create(file=("x.jsonl", data), purpose="batch")
    batch = world.sdk().batches.create(input_file_id=sent.id, endpoint=PATH, completion_window="24h")
    assert world.ended(batch.id).request_counts.to_dict() == {"total": 1, "completed": 1, "failed": 0}


def test_a_batch_is_cancelled_while_it_is_validated(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batch_files.runner.POLL_SECONDS", 0.0)
    reached, gate, parsed = threading.Event(), threading.Event(), []

    def parse(data: bytes) -> Any:
        parsed.append(data)
        reached.set()
        assert gate.wait(60)
        return json.loads(data)

    world.runner._line_limits = Limits(parse=parse)
    batch = world.run(*(line(str(i)) for i in range(50)))
    assert reached.wait(60)
    world.sdk().batches.cancel(batch.id)
    gate.set()
    assert world.ended(batch.id).status == "cancelled"
    assert len(parsed) == 1


def test_owners_take_turns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batch_files.runner.TURN_SECONDS", 0.0)
    world.model.gate.clear()
    long = [world.run(*(line(f"{i}") for i in range(100))) for _ in range(2)]
    short = world.run(line("a"), key="two")
    world.model.gate.set()
    ended = world.ended(short.id, "two")
    assert ended.completed_at <= world.ended(long[1].id).completed_at
    assert ended.in_progress_at <= world.ended(long[1].id).in_progress_at
    counts = [world.ended(batch.id).request_counts.completed for batch in long]
    assert counts == [100, 100]


def test_an_owner_has_a_limit_of_open_batches(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    import openai

    monkeypatch.setattr("api.dialects.batches.MOST_OPEN", 1)
    world.model.gate.clear()
    world.run(line("a"))
    with pytest.raises(openai.RateLimitError):
        world.run(line("b"))
    world.run(line("c"), key="two")
    world.model.gate.set()


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_only(*_: Any, **__: Any) -> Any:
    raise sqlite3.OperationalError("attempt to write a readonly database")


@pytest.mark.parametrize(
    ("place", "fails"),
    [
        ("api.dialects.uploads.tempfile.NamedTemporaryFile", full),
        ("tempfile._TemporaryFileCloser.close", full),
        ("batch_files.store.os.replace", full),
        ("batch_files.store.Store._change", read_only),
    ],
)
def test_a_folder_that_cannot_be_written_is_503_and_keeps_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, place: str, fails: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(place, fails)
        answer = upload(world, line("a").encode())
    assert error(answer, 503)["type"] == "unavailable_error"
    assert answer.headers["Retry-After"]
    assert list((world.folder / "files").iterdir()) == []
    assert upload(world, line("a").encode()).status_code == 200


@pytest.mark.parametrize("name", ["a\0b.jsonl", "a\nb.jsonl", "a\x1bb", "a\x7f"])
def test_control_characters_of_a_file_name_are_left_out(world: World, name: str) -> None:
    data = f'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\nx\r\n--b--\r\n'
    client = world.app.test_client()
    sent = client.post("/v1/files", data=data.encode(), content_type="multipart/form-data; boundary=b")
    if "\n" in name:  # which ends the header
        error(sent)
        assert list((world.folder / "files").iterdir()) == []
    else:
        assert sent.get_json()["filename"].isprintable()
        assert client.get(f"/v1/files/{sent.get_json()['id']}/content", buffered=True).status_code == 200


def test_an_expiry_of_its_own_is_refused(world: World) -> None:
    import openai

    sdk, expiry = world.sdk(), {"anchor": "created_at", "seconds": 3600}
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.files.create(file=content("x"), purpose="batch", expires_after=expiry)  # type: ignore[arg-type]
    assert (caught.value.param or "").startswith("expires_after")
    with pytest.raises(openai.BadRequestError) as caught:
        world.run(line("a"), output_expires_after=expiry)
    assert caught.value.param == "output_expires_after"


def test_a_client_cannot_have_the_request_id_of_a_line(world: World) -> None:
    client = world.app.test_client()
    answer = client.post(PATH, json={"prompt": "hi", "max_tokens": 1}, headers={"X-Request-Id": "batch_1.2"})
    assert answer.status_code == 200
    assert not answer.headers["X-Request-Id"].startswith("batch_")
    assert error(client.post(PATH, json={"prompt": "hi", "request_id": "batch_1.2"}))["param"] == "request_id"


def test_a_large_file_arrives_as_it_was_sent(world: World) -> None:
    for data in (b"x" * 3_000_000, b"".join(b"%d\n" % i for i in range(400_000)), b"\r\n--" * 500_000):
        sent = world.sdk().files.create(file=("large.jsonl", data), purpose="batch")
        assert sent.bytes == len(data)
        assert world.sdk().files.content(sent.id).content == data


def test_without_a_folder_there_are_no_batches(client: Any, app: Flask) -> None:
    for path in ("/v1/files", "/v1/batches", "/v1/files/x", "/v1/batches/x"):
        assert "--batch-folder" in error(client.get(path), 404)["message"]


def test_a_page_of_a_list_goes_on_after_the_last_entry(world: World) -> None:
    sdk = world.sdk()
    ids = [sdk.files.create(file=content(line(str(i))), purpose="batch").id for i in range(5)]
    page = sdk.files.list(limit=2, order="asc")
    assert [file.id for file in page.data] == ids[:2]
    assert [file.id for file in page] == ids  # it fetches the next pages
    assert [file.id for file in sdk.files.list(limit=3)] == ids[::-1]
    client = world.app.test_client()
    error(client.get("/v1/files?limit=x"))
    for path in ("/v1/files", "/v1/batches"):
        assert error(client.get(f"{path}?after=nope"), 404)["param"] == "after"


def test_lines_need_no_key_of_their_own_and_a_client_cannot_pretend_to_be_one(tmp_path: Path) -> None:
    world = World(tmp_path / "keyed", api_key="secret")
    done = world.ended(world.run(line("a"), key="secret").id, key="secret")
    assert done.status == "completed"
    client = world.app.test_client()
    for name in ("effective_batching.background", "effective-batching-background"):
        assert client.post(PATH, json={"prompt": "hi"}, headers={name: ""}).status_code == 401
    world.stop()

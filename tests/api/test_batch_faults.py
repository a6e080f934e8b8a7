"""What goes wrong while files and batches are stored and computed: full disks, ends at any moment, strange input."""

from __future__ import annotations

import errno
import json
import os
import re
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calls import error, service
from test_batches import World, full, line, upload
from test_batches import world as world

from app import connect
from batch_files.output import LineFile
from batch_files.store import Store
from config import ConfigError
from launch import preflight


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the thread of the batches try again at once."""
    monkeypatch.setattr("batch_files.runner.DISK_SECONDS", 0.0)
    monkeypatch.setattr("batch_files.runner.POLL_SECONDS", 0.01)


@pytest.mark.parametrize(
    "name", ["at 3.21\u202fPM.jsonl", "\u3000.jsonl", "\U0001f468\u200d\U0001f469", "../../up.jsonl"]
)
def test_a_file_name_without_control_characters_is_kept(world: World, name: str) -> None:
    sent = upload(world, b"x", name).get_json()
    assert sent["filename"] == re.split(r"[/\\]", name)[-1]  # without the folders of its client
    assert world.app.test_client().get(f"/v1/files/{sent['id']}/content", buffered=True).status_code == 200


def test_no_field_of_an_upload_is_ignored_silently(world: World) -> None:
    assert upload(world, b"x", other="1").headers["X-Ignored-Params"] == "other"
    refused = upload(world, b"x", expires_after='{"anchor": "created_at", "seconds": 3600}')
    assert error(refused)["param"] == "expires_after"


def test_a_file_whose_lines_are_all_bad_fails_as_a_whole_however_many_there_are(world: World) -> None:
    done = world.ended(world.run(*["{}"] * 150).id)
    assert (done.status, done.request_counts.total, len(done.errors.data)) == ("failed", 150, 100)


def test_a_line_is_sent_with_no_more_bytes_than_it_had(world: World) -> None:
    one = line("a")[:-2] + ',"unknown":"' + "\u00e9" * 500_000 + '"}}'
    done = world.ended(world.run(one, line("b", prompt="\ud800")).id)
    assert done.request_counts.completed + done.request_counts.failed == 2
    assert "a" in [row["custom_id"] for row in world.rows(done.output_file_id)]


def test_half_a_surrogate_pair_in_an_id_leaves_the_output_valid(world: World) -> None:
    done = world.ended(world.run(line("a\ud83d", prompt="x")).id)
    data = world.runner.store.path(done.output_file_id).read_bytes()
    assert json.loads(data.decode("utf-8"))["custom_id"] == "a\ud83d"


def test_a_batch_that_is_cancelled_before_its_turn_ends_at_once(world: World) -> None:
    world.model.gate.clear()
    first, second = world.run(line("a")), world.run(line("b"))
    world.sdk().batches.cancel(second.id)
    try:
        assert world.ended(second.id).status == "cancelled"
        assert world.sdk().batches.retrieve(first.id).status != "completed"
    finally:
        world.model.gate.set()
    assert world.ended(first.id).status == "completed"


@pytest.mark.usefixtures("impatient")
def test_a_batch_can_be_cancelled_while_the_disk_is_full(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = threading.Event()

    def append(*_: Any) -> None:
        fails.set()
        full()

    monkeypatch.setattr(LineFile, "append", append)
    batch = world.run(line("a"))
    assert fails.wait(60)
    world.sdk().batches.cancel(batch.id)
    assert world.ended(batch.id).status == "cancelled"


def test_an_end_of_the_process_within_an_expiry_loses_no_line(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.stop()
    world.start(connected=False)
    batch = world.run(line("a"), line("b"))
    fails = threading.Event()

    def append(*_: Any) -> None:
        fails.set()
        full()

    def begin() -> None:
        world.runner.store._clock = lambda: batch.expires_at + 1.0
        connect(service(world.app), world.engine)

    with monkeypatch.context() as patch:
        patch.setattr(LineFile, "append", append)
        begin()
        assert fails.wait(60)
        world.stop()
    world.start(connected=False)
    begin()
    done = world.ended(batch.id)
    assert (done.status, len(world.rows(done.error_file_id))) == ("expired", 2)


def failing(times: int, act: Callable[..., Any], fails: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
    """Return what fails so many times as if the disk were full."""
    left = [None] * times

    def call(*args: Any) -> Any:
        if left and fails(*args):
            left.pop()
            full()
        return act(*args)

    return call


@pytest.mark.usefixtures("impatient")
def test_a_batch_whose_files_could_not_be_opened_is_computed_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []

    def is_second(path: Path) -> bool:
        opened.append(path)
        return len(opened) == 2

    monkeypatch.setattr("batch_files.runner.LineFile", failing(1, LineFile, is_second))
    assert world.ended(world.run(line("a")).id).status == "completed"


def test_a_file_of_answers_that_could_not_be_read_is_not_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("batch_files.output._whole", full)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            LineFile(tmp_path / "out.jsonl")
    LineFile(tmp_path / "out.jsonl").close()


@pytest.mark.usefixtures("impatient")
def test_a_database_that_fails_for_a_while_costs_no_line(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    count = Store.count

    def fail(store: Store, *args: Any) -> None:
        counts.append(1)
        if len(counts) < 4:
            raise sqlite3.OperationalError("database or disk is full")
        count(store, *args)

    monkeypatch.setattr(Store, "count", fail)
    computed: list[str] = []
    world.model.before = lambda plan: computed.extend(seq.id for seq in plan.sequences)
    done = world.ended(world.run(*(line(str(i), max_tokens=1) for i in range(40))).id)
    assert done.request_counts.to_dict() == {"total": 40, "completed": 40, "failed": 0}
    assert len(set(computed)) == len(computed) == 40


def test_metrics_go_on_without_the_database(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(Store, "usage", fail)
    text = world.app.test_client().get("/metrics").text
    assert "eb_batch_lines_total" in text
    assert "eb_batch_files" not in text


def test_what_an_upload_left_behind_is_deleted_after_an_hour(world: World) -> None:
    store = world.runner.store
    left = store.path("upload-1")
    left.write_bytes(b"x")
    store.purge(0)
    assert left.exists()
    os.utime(left, (store.now() - 3700,) * 2)
    store.purge(0)
    assert not left.exists()


def test_a_file_can_be_deleted_from_a_full_disk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    id = upload(world, b"x").get_json()["id"]
    store, change = world.runner.store, Store._change

    def change_if_there_is_room(*args: Any) -> int:
        if store.path(id).exists():
            raise sqlite3.OperationalError("database or disk is full")
        return change(*args)

    monkeypatch.setattr(Store, "_change", change_if_there_is_room)
    assert world.app.test_client().delete(f"/v1/files/{id}").status_code == 200


@pytest.mark.parametrize("name", ["batches.sqlite", "files"])
def test_a_folder_with_something_else_in_the_place_of_its_files_is_refused_at_start(tmp_path: Path, name: str) -> None:
    preflight.check_batch_folder(tmp_path / "new")
    (tmp_path / name).write_text("a shopping list " * 100)
    with pytest.raises(ConfigError, match="--batch-folder"):
        preflight.check_batch_folder(tmp_path)

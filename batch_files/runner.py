"""Computes batches, in turn for each owner, a bounded number of lines at a time.

An answer is appended to a file when it is there, so that a process that continues after a kill finds what has no answer
yet. It must not know HTTP, or how a line is computed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, BinaryIO, Protocol

from batch_files.job import Job, is_final, read_json
from batch_files.lines import BadLine, Limits, Line, answer, expired, failed, numbered, parse, to_json
from batch_files.output import LineFile
from batch_files.store import Row, Store

log = logging.getLogger("effective-batching")

POLL_SECONDS = 0.5
DISK_SECONDS = 5.0  # before an answer that did not fit on the disk is written again
RETRY_SECONDS = 1.0
PURGE_SECONDS = 600.0
TURN_SECONDS = 60.0  # of a batch while another owner has one too; each turn reads the files again
WORK_SECONDS = 0.002  # of the processor that reading lines takes before it rests as long: others need the interpreter
MOST_ERRORS = 100  # that a batch that failed lists
Done = Callable[[int, str, bytes], None]
Problem = tuple[str, str, int | None]  # code, message, and number of the line


class Sender(Protocol):
    """Has a request computed: `done` is called once, in any thread, with status, id and body of the answer."""

    def send(self, line: Line, owner: str, id: str, done: Done) -> None: ...
    def cancel(self, id: str) -> None: ...


class _Over(Exception):
    """The batch, or the process, ends while its lines are read."""


class Runner:
    """The thread that computes the batches of a store with at most `width` lines at once, while `is_ready()`.

    `max_lines` bounds the lines of a batch, which are read by `lines`; `retention` is for how many seconds files and ended
    batches are kept. Owners with open batches take turns.
    """

    def __init__(
        self,
        store: Store,
        sender: Sender,
        *,
        max_lines: int,
        lines: Limits,
        retention: float,
        is_ready: Callable[[], bool],
        width: int,
    ) -> None:
        self.store = store
        self.completed = 0  # lines, since the process began
        self.failed = 0
        self._sender = sender
        self._max_lines = max_lines
        self._line_limits = lines
        self._retention = retention
        self._is_ready = is_ready
        self._width = width
        self._wake = threading.Event()
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self._purged_at = 0.0
        self._served: dict[str, float] = {}  # when each owner's last turn ended

    def start(self) -> None:
        """Start the thread, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Look for a new batch, or a new status, at once."""
        self._wake.set()

    def stop(self, seconds: float = 2.0) -> None:
        """End the thread; open lines are cancelled, and computed by the next process."""
        self._is_stopping = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        """Compute batches while no other process computes those of this folder, as one that drains does."""
        while not self._is_stopping:
            try:
                with (self.store.folder / "lock").open("a") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    while not self._is_stopping:
                        self._turn()
            except BlockingIOError:  # another process has the lock
                self._pause(POLL_SECONDS)
            except (OSError, sqlite3.Error) as error:
                log.error("cannot use --batch-folder: %s. Free space there, or make it writable", error)
                self._pause(DISK_SECONDS)
            except Exception:  # the next turn continues with what is on the disk
                log.exception("the computation of a batch failed and is tried again")
                self._pause(DISK_SECONDS)

    def _pause(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _turn(self) -> None:
        """Compute the next batch for a while: to its end, unless another owner has one too."""
        if time.monotonic() - self._purged_at > PURGE_SECONDS or not self._purged_at:
            self._purged_at = time.monotonic()
            self.store.purge(int(self.store.now() - self._retention))
        waiting = self._look()
        if not waiting or not self._is_ready():
            self._pause(POLL_SECONDS)
            return
        self._served = {batch["owner"]: self._served.get(batch["owner"], 0.0) for batch in waiting}
        batch = min(waiting, key=lambda one: self._served[one["owner"]])  # the oldest, where none was served yet
        try:
            with suppress(_Over):  # the next turn sees what ended it
                self._compute(batch)
        finally:
            self._served[batch["owner"]] = time.monotonic()

    def _compute(self, batch: Row) -> None:
        """Go on with a batch until it ends, or until the turn of another owner."""
        try:
            file = self.store.path(batch["input_file_id"]).open("rb")
        except FileNotFoundError:
            self._fail(batch, 0, [("missing_file", "the input file is gone", None)])
            return
        with file:
            if batch["status"] == "validating" and not self._validate(batch, file):
                return
            with self._open(batch) as job:
                job.lines = iter(job.pending(file, self._limits(batch)))
                try:
                    ended = self._send_all(job)
                    if ended == "expired":
                        self._expire(job, file)
                finally:
                    for number in job.open:
                        self._sender.cancel(job.request_id(number))
        if ended == "completed" and not self.store.move(job.id, "finalizing"):
            ended = "cancelled"  # after the last look
        if ended is not None:
            self._end(job, ended)

    @contextmanager
    def _open(self, batch: Row) -> Iterator[Job]:
        """Open the files of a batch's answers, which are on the disk afterwards."""
        paths = self.store.path(batch["output_id"]), self.store.path(batch["error_id"])
        with LineFile(paths[0]) as answered, LineFile(paths[1]) as errors:
            yield Job(batch, answered, errors)

    def _end(self, job: Job, status: str) -> None:
        self.store.count(job.id, job.completed, job.failed)
        self.store.end(job.row, status)

    def _look(self, current: str = "") -> list[Row]:
        """Return the oldest batch of each owner; end those that were cancelled while they waited for their turn."""
        waiting = []
        for batch in self.store.due():
            if batch["status"] != "cancelling":
                waiting.append(batch)
            elif batch["id"] != current:
                with self._open(batch) as job:
                    pass
                self._end(job, "cancelled")
        return waiting

    def _validate(self, batch: Row, file: BinaryIO) -> bool:
        """Read the lines of a batch; end it if none of them can be computed.

        Here a line whose id an earlier one has is good, as that one is.
        """
        limits, bad, total, is_good = self._limits(batch), list[BadLine](), 0, False
        for number, data in numbered(file, limits):
            if number > self._max_lines:
                message = (
                    f"the file has more than {self._max_lines:,} lines, which is the most of a batch. Split the file"
                )
                self._fail(batch, 0, [("too_many_lines", message, None)])
                return False
            total += 1
            try:
                parse(number, data, batch["endpoint"], limits)
                is_good = True
            except BadLine as error:
                if len(bad) < MOST_ERRORS:
                    bad.append(error)
        if is_good:
            return self.store.move(batch["id"], "in_progress", total=total)
        problems: list[Problem] = [(one.code, str(one), one.number) for one in bad]
        self._fail(batch, total, problems or [("empty_file", "the file has no lines", None)])
        return False

    def _limits(self, batch: Row) -> Limits:
        """Return how the lines of a batch are read: with rests, and until it is cancelled, which is looked up now and then."""
        looked, rested = time.monotonic(), time.thread_time()

        def check() -> None:
            nonlocal looked, rested
            if self._is_stopping:
                raise _Over
            if time.monotonic() - looked > POLL_SECONDS:
                looked = time.monotonic()
                if self._is_cancelled(batch):
                    raise _Over
            if (worked := time.thread_time() - rested) > WORK_SECONDS:
                time.sleep(worked)
                rested = time.thread_time()

        return replace(self._line_limits, check=check)

    def _is_cancelled(self, batch: Row) -> bool:
        return self.store.status(batch["id"]) in ("cancelling", "cancelled")

    def _fail(self, batch: Row, total: int, problems: list[Problem]) -> None:
        data = [{"code": code, "line": line, "message": message, "param": None} for code, message, line in problems]
        errors = json.dumps({"object": "list", "data": data})
        self.store.move(batch["id"], "failed", total=total, errors=errors)

    def _send_all(self, job: Job) -> str | None:
        """Send lines until all have answers; return how the batch ended, or None if its turn or the process ends."""
        turn_ends, is_our_turn = time.monotonic() + TURN_SECONDS, True
        while not self._is_stopping:
            waiting = self._look(job.id)
            if job.id not in [batch["id"] for batch in waiting]:
                return "cancelled"
            if self.store.now() >= job.row["expires_at"]:
                return "expired"
            while is_our_turn and len(job.open) < self._width and not self._is_stopping:
                if job.again and job.again[0][0] <= time.monotonic():
                    self._send(job, job.again.popleft()[1])
                    continue
                line = next(job.lines, None)
                if line is None:
                    break
                if isinstance(line, BadLine):
                    self._keep(job, failed(line), is_error=True)
                else:
                    self._send(job, line)
            if not job.open:
                if not is_our_turn:
                    return None
                if not job.again and not self._is_stopping:
                    return "completed"
            self._receive(job)
            is_our_turn = time.monotonic() < turn_ends or len(waiting) < 2
        return None

    def _send(self, job: Job, line: Line) -> None:
        job.open[line.number] = line

        def done(status: int, id: str, body: bytes) -> None:
            job.results.put((line.number, status, id, body))

        self._sender.send(line, job.row["owner"], job.request_id(line.number), done)

    def _receive(self, job: Job) -> None:
        """Take in the answers that are there, or the next one if it comes soon."""
        try:
            results = [job.results.get(timeout=POLL_SECONDS)]
        except queue.Empty:
            return
        while not job.results.empty():
            results.append(job.results.get())
        for number, status, id, data in results:
            line = job.open.pop(number)
            body = read_json(data)
            if status in (429, 503) and not is_final(body):
                job.again.append((time.monotonic() + RETRY_SECONDS, line))
            else:
                self._keep(job, answer(line.custom_id, status, id, body), is_error=status >= 400)

    def _keep(self, job: Job, line: dict[str, Any], is_error: bool) -> None:
        """Append an answer to its file, again and again while the disk is full, unless the process or the batch ends."""
        data = to_json(line)
        while not self._is_stopping:
            try:
                (job.errors if is_error else job.answered).append(data)
                break
            except OSError as error:
                log.error("cannot write the answers of %s: %s. Free space in --batch-folder", job.id, error.strerror)
                self._pause(DISK_SECONDS)
                if self._is_cancelled(job.row):
                    raise _Over from None
        else:
            raise _Over
        job.completed += not is_error
        job.failed += is_error
        self.completed += not is_error
        self.failed += is_error
        if time.monotonic() - job.counted_at > POLL_SECONDS:
            job.counted_at = time.monotonic()
            with suppress(sqlite3.Error):  # a full disk; the count is made again
                self.store.count(job.id, job.completed, job.failed)

    def _expire(self, job: Job, file: BinaryIO) -> None:
        """Write an error for each line that was not computed in time."""
        for line in job.pending(file, self._limits(job.row)):
            self._keep(job, failed(line) if isinstance(line, BadLine) else expired(line), is_error=True)

"""Computes batches, one after the other, a bounded number of lines at a time.

An answer is appended to a file when it is there, so that a process that continues after a kill finds what has no answer
yet. It must not know HTTP, or how a line is computed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

from batch_files.lines import BadLine, Line, Pending, answer, expired, failed
from batch_files.output import LineFile
from batch_files.store import Row, Store

log = logging.getLogger("effective-batching")

POLL_SECONDS = 0.5
DISK_SECONDS = 5.0  # before an answer that did not fit on the disk is written again
RETRY_SECONDS = 1.0
PURGE_SECONDS = 600.0
MOST_ERRORS = 100  # that a batch that failed lists
Done = Callable[[int, str, bytes], None]


class Sender(Protocol):
    """Has a request computed: `done` is called once, in any thread, with status, id and body of the answer."""

    def send(self, line: Line, owner: str, id: str, done: Done) -> None: ...
    def cancel(self, id: str) -> None: ...


@dataclass(slots=True)
class Job:
    """The batch that is computed now."""

    row: Row
    answered: LineFile
    errors: LineFile
    completed: int
    failed: int
    open: dict[int, Line] = field(default_factory=dict)
    again: deque[tuple[float, Line]] = field(default_factory=deque)  # when, and which
    results: queue.SimpleQueue[tuple[int, int, str, bytes]] = field(default_factory=queue.SimpleQueue)
    counted_at: float = 0.0

    @property
    def id(self) -> str:
        return str(self.row["id"])


class Runner:
    """The thread that computes the batches of a store with at most `width` lines at once, while `is_ready()`.

    `max_lines` bounds the lines of a batch; `retention` is for how many seconds files and ended batches are kept.
    """

    def __init__(
        self,
        store: Store,
        sender: Sender,
        *,
        max_lines: int,
        retention: float,
        is_ready: Callable[[], bool],
        width: int,
    ) -> None:
        self.store = store
        self.completed = 0  # lines, since the process began
        self.failed = 0
        self._sender = sender
        self._max_lines = max_lines
        self._retention = retention
        self._is_ready = is_ready
        self._width = width
        self._wake = threading.Event()
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self._purged_at = 0.0

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
        with (self.store.folder / "lock").open("a") as lock:
            if not self._take(lock):
                return
            while not self._is_stopping:
                try:
                    self._turn()
                except Exception:  # the next turn continues with what is on the disk
                    log.exception("the computation of a batch failed and is tried again")
                    self._pause(DISK_SECONDS)

    def _take(self, lock: Any) -> bool:
        """Wait until no other process computes the batches of this folder, as one that drains does."""
        while not self._is_stopping:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                self._pause(POLL_SECONDS)
        return False

    def _pause(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _turn(self) -> None:
        if time.monotonic() - self._purged_at > PURGE_SECONDS or not self._purged_at:
            self._purged_at = time.monotonic()
            self.store.purge(int(self.store.now() - self._retention))
        batch = self.store.next_batch()
        if batch is None or not self._is_ready():
            self._pause(POLL_SECONDS)
            return
        try:
            file = self.store.path(batch["input_file_id"]).open("rb")
        except FileNotFoundError:
            self._fail(batch, 0, [_problem("missing_file", "the input file is gone")])
            return
        with file:
            if batch["status"] != "validating" or self._validate(batch, file):
                self._compute(batch, file)

    def _validate(self, batch: Row, file: BinaryIO) -> bool:
        """Count the lines of a batch; end it if none of them can be computed."""
        total = 0
        bad: list[BadLine] = []
        for one in Pending(file, [], batch["endpoint"]):
            total += 1
            if isinstance(one, BadLine) and len(bad) <= MOST_ERRORS:
                bad.append(one)
        problems = [_problem(one.code, str(one), one.number) for one in bad[:MOST_ERRORS]]
        if total > self._max_lines:
            message = f"the file has {total:,} lines, but a batch has at most {self._max_lines:,}. Split the file"
            problems = [_problem("too_many_lines", message)]
        elif total == 0:
            problems = [_problem("empty_file", "the file has no lines")]
        elif len(bad) < total:
            return self.store.move(batch["id"], "in_progress", total=total)
        self._fail(batch, total, problems)
        return False

    def _fail(self, batch: Row, total: int, problems: list[dict[str, Any]]) -> None:
        errors = json.dumps({"object": "list", "data": problems})
        self.store.move(batch["id"], "failed", total=total, errors=errors)

    def _compute(self, batch: Row, file: BinaryIO) -> None:
        with (
            LineFile(self.store.path(batch["output_id"])) as answered,
            LineFile(self.store.path(batch["error_id"])) as errors,
        ):
            job = Job(batch, answered, errors, answered.lines(), errors.lines())
            ended = self._send_all(job, iter(_pending(job, file)))
            for number in job.open:
                self._sender.cancel(_request_id(job.id, number))
            if ended is None:
                return
            if ended == "expired":
                self._expire(job, _pending(job, file))
        if ended == "completed":
            self.store.move(job.id, "finalizing")
        self.store.count(job.id, job.completed, job.failed)
        self.store.end(batch, ended)

    def _send_all(self, job: Job, lines: Iterator[Line | BadLine]) -> str | None:
        """Send lines until all have answers; return how the batch ended, or None if the process does."""
        while not self._is_stopping:
            status = self.store.status(job.id)
            if status in ("cancelling", "cancelled"):
                return "cancelled"
            if self.store.now() >= job.row["expires_at"]:
                return "expired"
            while len(job.open) < self._width and not self._is_stopping:
                if job.again and job.again[0][0] <= time.monotonic():
                    self._send(job, job.again.popleft()[1])
                    continue
                line = next(lines, None)
                if line is None:
                    break
                if isinstance(line, BadLine):
                    self._keep(job, failed(line), is_error=True)
                else:
                    self._send(job, line)
            if not job.open and not job.again:
                return "completed"
            self._receive(job)
        return None

    def _send(self, job: Job, line: Line) -> None:
        job.open[line.number] = line

        def done(status: int, id: str, body: bytes, number: int = line.number) -> None:
            job.results.put((number, status, id, body))

        self._sender.send(line, job.row["owner"], _request_id(job.id, line.number), done)

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
            body = _json(data)
            if status in (429, 503) and not _is_final(body):
                job.again.append((time.monotonic() + RETRY_SECONDS, line))
            elif not self._is_stopping:
                self._keep(job, answer(line.custom_id, status, id, body), is_error=status >= 400)

    def _keep(self, job: Job, line: dict[str, Any], is_error: bool) -> None:
        """Append an answer to its file, again and again while the disk is full."""
        data = json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
        while not self._is_stopping:
            try:
                (job.errors if is_error else job.answered).append(data)
                break
            except OSError as error:
                log.error("cannot write the answers of %s: %s. Free space in --batch-folder", job.id, error.strerror)
                self._pause(DISK_SECONDS)
        else:
            return
        job.completed += not is_error
        job.failed += is_error
        self.completed += not is_error
        self.failed += is_error
        if time.monotonic() - job.counted_at > POLL_SECONDS:
            job.counted_at = time.monotonic()
            self.store.count(job.id, job.completed, job.failed)

    def _expire(self, job: Job, pending: Pending) -> None:
        """Write an error for each line that was not computed in time."""
        for line in pending:
            self._keep(job, failed(line) if isinstance(line, BadLine) else expired(line), is_error=True)


def _pending(job: Job, file: BinaryIO) -> Pending:
    """Return the lines of a batch that have no answer yet."""
    with job.answered.reader() as answered, job.errors.reader() as errors:
        return Pending(file, [answered, errors], job.row["endpoint"])


def _problem(code: str, message: str, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "line": line, "message": message, "param": None}


def _request_id(batch: str, number: int) -> str:
    return f"{batch}.{number}"


def _is_final(body: Any) -> bool:
    """Return whether a refusal is this line's own fault: alone it does not fit into memory."""
    error = body.get("error") if isinstance(body, dict) else None
    return isinstance(error, dict) and error.get("type") == "out_of_memory"


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace")

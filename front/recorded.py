"""The steps in a record of `./eb vllm serve`, as if the loop of this process had made them: for the page, figures and metrics.

The record may not exist yet, grows, and begins anew with each start of vLLM. This module must not know HTTP.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import policies
from batching import BatchingManager
from scheduling.iteration import Drafted, Iteration, Member, SlotSteps
from scheduling.options import values_of
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from serving.inference import Inference, InferenceError
from serving.loop import notify

log = logging.getLogger("effective-batching")
LOOK_EVERY = 0.1  # seconds
SWITCH_SECONDS = 3.0  # vLLM looks for another policy four times a second, but only while it has requests
PIECE, KEPT = 1 << 20, 256  # bytes read at once, and remembered to tell whether the file is still the same
HINTS = ("client", "priority", "session", "open_ended")
Line = Mapping[str, Any]


class Tail:
    """The lines of a file that grows, may be replaced, and need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._last, self._rest = path, 0, b"", b""

    def read(self) -> list[bytes]:
        """Return new lines that are whole, at most about a megabyte; of another file, or one that was emptied, all from its first."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at - len(self._last))
                data = file.read(len(self._last) + PIECE)
        except OSError:
            return []
        if not data.startswith(self._last):
            self._at, self._last, self._rest = 0, b"", b""
            return self.read()
        new = data[len(self._last) :]
        self._at, self._last = self._at + len(new), data[-KEPT:]
        *lines, self._rest = (self._rest + new).split(b"\n")
        return lines


class Blocks(PagePool):
    """vLLM's blocks, of which only the numbers are known."""

    used = 0

    @property
    def free(self) -> int:
        return self.total - self.used


class Recorded(BatchingManager):
    """Stands for the loop whose steps are in a record; `on_begin` is called with the first line of the first run.

    It takes no requests. A policy that it is asked to switch to is written to a file beside the record, where vLLM finds it.
    """

    def __init__(self, path: Path, on_begin: Callable[[Line], None], on_restart: Callable[[], None]) -> None:
        super().__init__(cast(Any, None))
        self._tail, self._wish = Tail(path), path.with_name(f"{path.name}.policy")
        self._on_begin, self._on_restart = on_begin, on_restart
        self._epoch = time.time() - self._clock()  # the record has times of day
        self._requests: dict[str, Inference] = {}
        self._before = self._last = self._switches = 0  # `before` are the steps of runs before this one
        self.inbox.switch = self._request_switch  # type: ignore[method-assign]

    @property
    def waiting(self) -> int:
        return len(self._requests) - self.running

    def waited(self, inference: Inference) -> dict[str, tuple[int, float]]:
        return inference.sequence.waited

    def follow(self, stop: threading.Event) -> None:
        """Take in the record, and all that is added to it, until `stop`."""
        while not stop.is_set():
            self.inbox.heartbeat = self._clock()
            if not self.take_in():
                stop.wait(LOOK_EVERY)

    def take_in(self) -> int:
        """Take in what is new, and return the number of its lines; any that cannot be read are skipped."""
        lines = self._tail.read()
        for line in lines:
            try:
                self._take(json.loads(line))
            except Exception as error:
                log.warning("a line of the record cannot be read and is skipped: %r", error)
        return len(lines)

    def _take(self, line: Line) -> None:
        if "members" in line:
            if self.scheduler is not None:
                self._step(line)
        elif "switch" in line:
            self._use(line["switch"])
        elif "cancel" in line:
            self._leave({line["cancel"]: line["reason"]}, line["now"] - self._epoch, None)
        elif "arrive" in line:
            self._arrive(line)
        else:
            self._begin(line)

    def _begin(self, head: Line) -> None:
        """Begin a run of vLLM; what ran before is gone."""
        is_first = self.scheduler is None
        self._leave(dict.fromkeys(self._requests, "abort"), self._clock(), None)
        self._before = self._last
        self.pages = Blocks(head["pages"] + 1, head["page_size"])
        self.max_tokens_per_step = head["tokens"]
        self._use(head)
        (self._on_begin(head) if is_first else self._on_restart())

    def _use(self, head: Line) -> None:
        """Note which policy decides; a file with one is not run here."""
        slots = head["slots"]
        try:
            policy = policies.get_policy(head["policy"], slots, head["options"], own=False)
        except ValueError:
            policy = policies.get_policy("dynamic", slots)
            policy.name = Path(head["policy"]).name
        if self.scheduler is None:
            self.scheduler = Scheduler(policy, None, head["tokens"])
        self.scheduler.use(policy)
        with self.inbox.changed:
            self._switches += 1
            self.inbox.changed.notify_all()
        notify(self.fallback.listeners)  # they tell the page which policy decides

    def _request_switch(self, policy: Policy, timeout: float | None = None) -> None:
        """Have vLLM switch, and return when it has; InferenceError if it has not after some seconds."""
        before, draft = self._switches, self._wish.with_name(f"{self._wish.name}.new")
        try:
            draft.write_text(json.dumps({"policy": policy.name, "options": values_of(policy)}), "utf-8")
            os.replace(draft, self._wish)
        except OSError as error:
            text = f"cannot write {self._wish.name}: {error.strerror}. Make the folder of the record writable"
            raise InferenceError("server_error", text) from None
        with self.inbox.changed:
            if not self.inbox.changed.wait_for(lambda: self._switches > before, SWITCH_SECONDS):
                text = "vLLM has not switched yet. It does so in its next step, unless its log has an error"
                raise InferenceError("timeout_error", text)

    def _arrive(self, line: Line, is_background: bool = False) -> Inference:
        hints = {name: line[name] for name in HINTS if name in line}
        prompt, id = [0] * line["prompt"], line["arrive"]
        inference = Inference("", line["max_tokens"], prompt, id=id, is_background=is_background, **hints)
        inference.sequence.arrived_at = line["at"] - self._epoch
        self._requests[id] = inference
        notify(self.listeners, inference)
        return inference

    def _step(self, line: Line) -> None:
        n, t, members = line["n"] + self._before, line["t"] - self._epoch, [Member(**row) for row in line["members"]]
        left = {one["id"]: one["reason"] for one in line["left"]}
        iteration = Iteration(
            n, t, line["seconds"], line["policy"], line["queue"], members, line["joined"], list(left.items()),
            SlotSteps(**line["slot_steps"]), line["pages"]["used"], line["pages"]["total"], line.get("displaced", []),
            blocked_by=line.get("blocked_by"), drafts=[Drafted(**one) for one in line.get("drafts", ())],
        )  # fmt: skip
        for id in iteration.preempted:
            if id in self._requests:
                self._requests[id].sequence.preempt()
        for row in members:
            if row.id not in self._requests:  # its arrival is not in the record, so it is counted as background work
                lengths = {"prompt": row.computed, "max_tokens": row.total - row.computed}
                self._arrive({"arrive": row.id, "at": line["t"], **lengths}, is_background=True)
            self._advance(row, iteration, line["outputs"].get(row.id, 0))
        self._last, cast(Blocks, self.pages).used = n, iteration.pages_used
        running = [self._requests[row.id].sequence for row in members if row.id not in left]
        cast(Scheduler, self.scheduler).running[:] = running
        self._leave(left, t + iteration.seconds, iteration)

    def _advance(self, row: Member, step: Iteration, outputs: int) -> None:
        """Give a request what a step computed of it: an answer has a token as soon as its prompt is computed."""
        seq, end = self._requests[row.id].sequence, step.t + step.seconds
        seq.slot, seq.computed, seq.state, seq.last_iteration = row.slot, row.computed, "running", step.n
        if seq.scheduled_at is None:
            seq.scheduled_at, seq.first_iteration = step.t, step.n
        seq.batch_sum, seq.batch_max = seq.batch_sum + step.batch_size, max(seq.batch_max, step.batch_size)
        if (more := max(outputs, row.computed - len(seq.prompt_ids) + 1) - len(seq.output_ids)) > 0 and row.tokens:
            seq.output_ids += [0] * more
            seq.first_token_at, seq.last_token_at = seq.first_token_at or end, end

    def _leave(self, reasons: Mapping[str, str], now: float, iteration: Iteration | None) -> None:
        """Tell all observers of a step, if there was one, and of the requests that left."""
        left = [self._requests.pop(id) for id in reasons if id in self._requests]
        for inference in left:
            seq = inference.sequence
            seq.state, seq.finish_reason, seq.finished_at = "finished", reasons[inference.id], now
            if self.scheduler is not None and seq in self.scheduler.running:
                self.scheduler.running.remove(seq)
            inference.finished()
        if iteration is not None or left:
            notify(self.observers, iteration, left)

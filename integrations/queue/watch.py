"""`./eb vllm watch RECORD`: the live page, the figures and the policy of the vLLM that `./eb vllm serve` started with --record.

The recorded steps are replayed as if a loop in this process had made them, so the server's own pages can show them. The
record need not exist yet. It is followed as it grows, and from its beginning when vLLM restarts.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NoReturn, cast

from werkzeug.serving import make_server

import policies
from api.admin import operations, policy
from api.application import assemble, connect
from api.dialects import native
from api.http.deferral import App
from api.http.errors import ApiError
from api.pages import dashboard, events
from api.service import LoadedEngine, Service
from batching import BatchingManager, Inference, InferenceError
from config import Config
from integrations.queue.server import Silent
from observe.replay import question
from observe.replay.recording import Recording
from observe.replay.what_if import WhatIf
from scheduling.iteration import Iteration, Member, Members, SlotSteps, begin_of
from scheduling.options import values_of
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from serving.fallback import Lease, PolicyFailure
from serving.loop import notify

LOOK_EVERY = 0.1  # seconds
SWITCH_SECONDS = 3.0  # vLLM looks for another policy four times a second, but only while it has requests
PIECE, KEPT = 1 << 20, 256  # bytes read at once, and remembered to tell whether the file is still the same
NONE = cast(Any, None)
# Those that are served although their method is not GET.
CHANGES = ("/policy", "/policy/lease", "/policy/receipt", "/web/markdown", "/what-if")
HINTS = {"client", "priority", "open_ended", "adapter", "session", "program", "constrained"}


class Blocks(PagePool):
    """vLLM's blocks, of which only the numbers are known."""

    used = 0
    free = property(lambda self: self.total - self.used)


class Watch(BatchingManager):
    """Stands for the loop whose steps are in a record, and takes no requests; `app` shows it."""

    def __init__(self, path: Path, config: Config) -> None:
        super().__init__(NONE)
        self._path, self._service, self.app = path, Service(config, policies), App("watch", static_folder=None)
        assemble(self.app, self._service, (native, operations, policy, events, dashboard))
        for rule in self.app.url_map.iter_rules():
            if {"POST", "PUT", "DELETE"} & (rule.methods or set()) and rule.rule not in CHANGES:
                self.app.view_functions[rule.endpoint] = _refuse
            if rule.rule.endswith(("/what-if", "/blame")):
                view = self.app.view_functions[rule.endpoint]
                self.app.view_functions[rule.endpoint] = partial(self._simulate, view)
        self._at, self._latest, self._rest = 0, b"", b""  # bytes read, the latest of them, and a line that is not whole
        self._epoch = time.time() - time.perf_counter()  # the record has times of day
        self._requests: dict[str, Inference] = {}
        self._number = self._before = 0  # of the last step, and of the last one before vLLM started again
        self._asking = threading.Lock()  # one switch after the other
        self._ended, self._file = 0.0, ""  # when the last step ended, and the name of the policy's file, if it has one
        self._questions = question.Server(self, Recording(), inside=True)  # about what vLLM has done since it started
        self.listeners.append(lambda *new: self._questions.recording.on_arrival(*new))
        self.observers.append(lambda *step: self._questions.recording.observe(*step))
        self.inbox.switch = self._ask_for  # type: ignore[method-assign, assignment]

    @property
    def waiting(self) -> int:
        return len(self._requests) - self.running

    def follow(self) -> None:
        """Take in the record and all that is added to it, forever."""
        while True:
            self.inbox.heartbeat = time.perf_counter()
            if not self.take_in():
                time.sleep(LOOK_EVERY)

    def take_in(self) -> int:
        """Take in new whole lines, and return their number; those that cannot be read are skipped."""
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(self._at - len(self._latest))
            data = file.read(len(self._latest) + PIECE)
            if not data.startswith(self._latest):  # another file, or emptied by another start
                self._at, self._latest, self._rest, data = 0, b"", b"", b""
            new = data[len(self._latest) :]
            self._at, self._latest = self._at + len(new), data[-KEPT:]
            *lines, self._rest = (self._rest + new).split(b"\n")
            for line in lines:
                with suppress(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
                    self._take(json.loads(line))
            return len(lines)
        return 0

    def _take(self, line: dict[str, Any]) -> None:
        if "members" in line:
            self._step(line)
        elif "switch" in line:
            if "failure" in line:
                self.fallback.last = PolicyFailure(**line["failure"])
            self._use(line["switch"], line)
        elif "cancel" in line:
            self._leave([(line["cancel"], line["reason"])], line["now"] - self._epoch)
        elif "arrive" in line:
            self._epoch = min(self._epoch, line["at"])  # the record may be older than the start of this machine
            one = Inference("", line["max_tokens"], [0] * line["prompt"], id=line["arrive"])
            seq, due = one.sequence, line["deadline"]
            seq.arrived_at, seq.deadline = line["at"] - self._epoch, due and due - self._epoch
            seq.hashes = [b"%d" % page for page in line["pages"]]
            for name in HINTS & line.keys():
                setattr(seq, name, line[name])
            self._requests[one.id] = one
            notify(self.listeners, one)
        elif "slots" in line:  # vLLM has started: what ran before is gone
            self._before, self.pages = self._number, Blocks(line["pages"] + 1, line["page_size"])
            self._leave([(id, "abort") for id in self._requests], time.perf_counter())
            self.max_tokens_per_step, self._ended = line["tokens"], 0.0
            self._use(line, line)
            self._questions.recording = Recording(clock=lambda: self._ended)  # the record may be old
            self._questions.slots, self._questions.late = line["slots"], False
            if self._service.engine is None:
                connect(self._service, LoadedEngine(
                    model=NONE, tokenizer=cast(Any, Silent()), model_name="vLLM", device="none", dtype="", kv_dtype="",
                    context=line.get("context", 0), facts={"watched": True},
                    vocabulary=0, width=0, n_pages=0, page_size=1, tokens_per_step=0, manager=self, make_inference=NONE, grammars=NONE,
                    what_if=WhatIf(self._questions, line.get("context", 4096)),
                ))  # fmt: skip
            for viewer in list(self._service.feed.viewers):
                viewer.gone = True  # it connects again, since vLLM may have other slots now

    def _use(self, head: dict[str, Any], line: dict[str, Any]) -> None:
        """Note which policy decides, and its lease; a file with one is not run here."""
        try:
            chosen, self._file = policies.get_policy(head["policy"], head["slots"], head["options"], own=False), ""
        except ValueError:
            chosen = policies.get_policy("dynamic", head["slots"])
            chosen.name = self._file = Path(head["policy"]).name
        with self.inbox.changed:
            self.scheduler = self.scheduler or Scheduler(chosen)
            self.scheduler.use(chosen)
            self.fallback.holder, self.fallback.ends_at = line.get("lease", ""), line.get("until", inf)
            self.inbox.changed.notify_all()
        notify(self.fallback.listeners)  # they tell the page

    def _ask_for(self, wanted: Policy | None, timeout: float | None = None, lease: Lease | None = None) -> None:
        """Request a switch, or without a policy the end of a lease, by writing RECORD.policy, and wait until the record shows it.

        The file has the time at which vLLM goes back by itself. Raise InferenceError if another has a lease, or too late.
        """
        with self._asking, self.inbox.changed:
            now, before, kept, file = time.time(), self.policy, self.fallback, f"{self._path}.policy"
            if kept.ends_at <= now:  # vLLM goes back in its next step
                kept.holder, kept.ends_at = "", inf
            wish: dict[str, Any] = {"lease": kept.holder}
            if wanted is not None:
                kept.check(lease, now)
                if wanted.name == self._file:
                    raise InferenceError("invalid_request_error", f"vLLM loads {self._file} at its start only")
                wish = {"policy": wanted.name, "options": values_of(wanted)}
                wish |= {"lease": lease.holder, "until": now + lease.seconds, "renews": lease.renews} if lease else {}
            elif not kept.is_ended_by(lease):
                return
            Path(f"{file}.new").write_text(json.dumps(wish), "utf-8")
            os.replace(f"{file}.new", file)
            mine = wish.get("lease", "") if wanted else ""
            if not self.inbox.changed.wait_for(
                lambda: self.policy is not before and kept.holder == mine, SWITCH_SECONDS
            ):
                text = "vLLM has not switched yet. It does so in its next step, unless its log has an error"
                if mine:
                    os.unlink(file)  # or a lease would begin of which its holder was not told
                    text = "vLLM has not switched: it had nothing to do, or its log has an error. Send it requests, and try again"
                raise InferenceError("timeout_error", text)

    def _step(self, line: dict[str, Any]) -> None:
        members, pages = Members.of(Member(**row) for row in line["members"]), line["pages"]
        planned = line["t"] - self._epoch
        begin, overlaps = begin_of(planned, self._ended)
        self._questions.late |= overlaps
        self._ended = planned + line["seconds"]
        step = Iteration(
            line["n"] + self._before, begin, self._ended - begin, line["policy"], line["queue"], members, line["joined"],
            [(one["id"], one["reason"]) for one in line["left"]], SlotSteps(**line["slot_steps"]), pages["used"], pages["total"],
            line.get("displaced", []), blocked_by=line.get("blocked_by"),
        )  # fmt: skip
        self._number, cast(Blocks, self.pages).used, end = step.n, pages["used"], self._ended
        for one in filter(None, map(self._requests.get, step.preempted)):
            one.sequence.preempt()
        for row in (row for row in members if row.id in self._requests):
            seq = self._requests[row.id].sequence
            seq.slot, seq.computed, seq.state = row.slot, row.computed, "running"
            seq.scheduled_at = seq.scheduled_at or planned
            # An answer has its first token as soon as the prompt is computed.
            total = line["outputs"].get(row.id, row.computed - len(seq.prompt_ids) + 1)
            if row.tokens and total > len(seq.output_ids):
                seq.output_ids += [0] * (total - len(seq.output_ids))
                seq.first_token_at, seq.last_token_at = seq.first_token_at or end, end
        self._leave(step.left, end, step)

    def _leave(self, reasons: Iterable[tuple[str, str]], now: float, step: Iteration | None = None) -> None:
        """Tell the observers of a step, if there was one, and of the requests that left."""
        left = [(self._requests.pop(id), reason) for id, reason in reasons if id in self._requests]
        for one, reason in left:
            one.sequence.state, one.sequence.finish_reason, one.sequence.finished_at = "finished", reason, now
        if self.scheduler is not None:
            live = (one.sequence for one in self._requests.values())
            self.scheduler.running[:] = [seq for seq in live if seq.state == "running"]
        for observers in (self.on_leave, self.observers):
            notify(observers, step, [one for one, _ in left])

    def _simulate(self, view: Callable[..., Any], **values: Any) -> Any:
        if self._file:
            raise ApiError(f"{self._file} is a file, which is not run here. Use a named policy", type="not_found_error")
        return view(**values)


def _refuse(**values: Any) -> NoReturn:
    text = "this is not served where vLLM is only watched. Send requests to vLLM itself"
    raise ApiError(text, type="not_found_error")


def main() -> None:
    """Serve at a port of this machine until Ctrl-C."""
    parser = argparse.ArgumentParser("./eb vllm watch", description=__doc__, allow_abbrev=False)
    parser.add_argument("record", type=Path, help="the file that ./eb vllm serve --record writes; it may come later")
    parser.add_argument("--port", type=int, default=8700, help="port to listen at (default %(default)s)")
    given = parser.parse_args()
    config = Config(policy="", host="127.0.0.1", port=given.port)  # others reach it through a tunnel
    watch = Watch(given.record, config)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line for each request
    server = make_server(config.host, config.port, watch.app, threaded=True)
    threading.Thread(target=watch.follow, daemon=True).start()
    print(f"watching {given.record} at http://{config.address}/", flush=True)  # noqa: T201
    server.serve_forever()


if __name__ == "__main__":
    main()

"""One request as its handler sees it: it waits for an `Inference`, or reads its tokens as they arrive.

The loop never waits for a reader: once per step it publishes the number of tokens, and wakes a reader only if the
reader asked for it. This module must not know HTTP, tensors, or how requests are scheduled.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from scheduling.sequence import Sequence
from serving.adapters import Loaded
from serving.call import Call
from serving.wakeup import Wakeup

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0  # between two checks of a waiter that the loop still works on its inference


class InferenceError(Exception):
    """The error that ended a request; `kind` is server_error, cancelled, timeout_error or another error type."""

    def __init__(self, kind: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after


class GrowingText(Protocol):
    """The part of an answer that is certain while it grows."""

    @property
    def shown_tokens(self) -> int: ...
    def feed(self, tokens: list[int]) -> str: ...
    def rest(self, whole: str) -> str: ...


class Text(Protocol):
    """Converts the token ids of one answer to text, and detects stop strings."""

    @property
    def watches(self) -> bool: ...
    @property
    def stop_reason(self) -> str | int | None: ...
    def feed(self, token: int) -> str | None: ...
    def text(self, output_ids: list[int]) -> str: ...
    def growing(self, follows_tokens: bool = False) -> GrowingText: ...


class Inbox(Protocol):
    """What an inference asks of the inbox of the loop that computes it, a `serving.inbox.Inbox`."""

    is_closed: bool

    def remove(self, ended: list[Inference]) -> None: ...
    def has_lost(self, inference: Inference) -> bool: ...
    def closed_error(self) -> InferenceError: ...


class Inference:
    """One request as its handler sees it. It finishes exactly once: with a completion or an error.

    * `wakeup`: its tokens can be read as they come; `ready` is the number of published tokens.
    * `on_end` is called in the thread that ends it, and must not block.
    * `scores_prompt`: the whole prompt is computed, even if it is cached, and `num_tokens` may be 0.
    * `embeds`: the answer is the prompt's embedding, and `num_tokens` may be 0.
    * `open_ended`: the client named no length, so `num_tokens` is the rest of the context.
    * `deadline`, `queue_timeout`, `request_timeout`: seconds from its arrival in which the answer is wanted, after which it
      times out in the queue, and after which it times out as a whole. The server's limits apply if they are shorter.
    * `call`: the request as part of a program.
    * `tenant`: a hash of its client's key, where tenants are kept from sharing answers.
    * `is_background`: it is computed while the server has nothing else to do, takes no place, and has no deadline.
    * `has_place`: its HTTP request holds a place for it.
    * `first` is set by deduplication: the inference whose answer it gets too.
    """

    def __init__(
        self,
        prompt: str,
        num_tokens: int,
        prompt_ids: list[int],
        *,
        id: str = "",
        sampling: Any = None,
        text: Text | None = None,
        client: str = "",
        priority: int = 0,
        session: str = "",
        keep_s: float = 0.0,
        call: Call | None = None,
        open_ended: bool = False,
        deadline: float | None = None,
        queue_timeout: float = math.inf,
        request_timeout: float = math.inf,
        wakeup: Wakeup | None = None,
        scores_prompt: bool = False,
        embeds: bool = False,
        on_end: Callable[[], None] | None = None,
        adapter: Loaded | None = None,
        tenant: str = "",
        is_background: bool = False,
        has_place: bool = False,
    ) -> None:
        self.id = id or uuid.uuid4().hex
        self.prompt = prompt
        self.num_tokens = num_tokens
        self.text = text
        self.wakeup = wakeup
        self._on_end = on_end
        self.ready = 0
        self.is_received = False  # the loop has taken it in, or refused it
        self.deadline = deadline
        self.scores_prompt = scores_prompt
        self.fewest_tokens = 0 if scores_prompt or embeds else 1
        self.call = call
        self.tenant = tenant
        self.is_background = is_background
        self.places = (
            0 if is_background or has_place else 1
        )  # that the inbox takes for it, until the loop has finished it
        self.first: Inference | None = None
        self.queue_timeout = queue_timeout
        self.request_timeout = request_timeout
        self.error: InferenceError | None = None
        self.is_finished = False
        self.event_obj = threading.Event()
        self.sequence = Sequence(
            prompt_ids, num_tokens, id=self.id, sampling=sampling, client=client, priority=priority,
            session=session, program=call.program if call else "", keep_s=keep_s, open_ended=open_ended,
            constrained=getattr(sampling, "grammar", None) is not None,
            stop=text.feed if text is not None and text.watches else None,
        )  # fmt: skip
        if adapter is not None:
            self.sequence.adapter, self.sequence.adapter_weights = adapter.name, adapter.weights
            self.sequence.cache_salt = adapter.salt
        self._lock = threading.Lock()
        self._kept: int | None = None  # number of tokens when `end_early` ended it
        self._inbox: Inbox | None = None
        self._was_lost = False  # at the last check

    def attach(self, inbox: Inbox, now: float) -> None:
        """Connect the inference to the loop that will compute it, and stamp its arrival; `enqueue` calls this once."""
        self._inbox = inbox
        self.sequence.arrived_at = now
        if self.deadline is not None:
            self.sequence.deadline = now + self.deadline

    @property
    def queue_tokens(self) -> int:
        """The tokens that it adds to the queue, of prompt and answer; a copy of another inference adds none."""
        return 0 if self.is_background or self.first is not None else self.sequence.total

    @property
    def data(self) -> list[int]:
        """The token ids so far, with those of the prompt first."""
        return self.sequence.prompt_ids + self.output_ids

    @property
    def output_ids(self) -> list[int]:
        """The generated token ids so far, without those after an early end."""
        return self.sequence.output_ids[: self._kept]

    @property
    def details(self) -> list[Any]:
        """The model's details of each of `output_ids`, if requested."""
        return self.sequence.details[: self._kept]

    @property
    def finish_reason(self) -> str | None:
        """The reason stop or length, or None before the end and after a failure."""
        if not self.is_finished or self.error is not None:
            return None
        return self.sequence.finish_reason if self._kept is None else "length"

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or id that ended it, "timeout" after an early end, otherwise None."""
        if self._kept is not None:
            return "timeout"
        return self.text.stop_reason if self.text is not None else None

    @property
    def answer(self) -> str:
        """The generated text without the prompt."""
        return self.text.text(self.output_ids) if self.text else ""

    @property
    def completion(self) -> str | None:
        """Prompt and generated text once finished, else None."""
        if not self.is_finished or self.error is not None:
            return None
        return self.prompt + self.answer

    def add_token(self, token: int) -> bool:
        """Append a generated token id; return whether it is the last one."""
        self.sequence.output_ids.append(token)
        return len(self.sequence.output_ids) >= self.num_tokens

    def receive(self, wakes: bool) -> None:
        """Note that the loop has taken it in; with `wakes`, its reader waits for that."""
        self.is_received = True
        if wakes and self.wakeup is not None:
            self.wakeup.notify()

    def publish_tokens(self) -> None:
        """Publish the tokens so far to the reader of a stream; the loop calls this after each step with a new token."""
        if self.wakeup is None:
            return
        # Tokens are appended before `ready` grows, so a reader needs no lock for those below it.
        self.ready = len(self.sequence.output_ids)
        try:
            if self.wakeup.wants_tokens:
                self.wakeup.notify_tokens()
        except Exception as error:  # of one reader, which the loop and the other requests must survive
            log.exception("cannot notify the reader of a stream")
            self.cancel(failure(error))

    def finished(self, error: InferenceError | None = None) -> bool:
        """End the inference and wake its waiters; return False if it has already ended."""
        return self._end(error, early=False)

    def _end(self, error: InferenceError | None, early: bool) -> bool:
        # The loop, a deadline, a client that leaves and a waiter race to end it. The first one wins: the error and the
        # number of tokens never change once it is finished, so that readers need no lock.
        with self._lock:
            if self.is_finished:
                return False
            self.error = error
            if early:
                self._kept = len(self.sequence.output_ids)
            self.is_finished = True
        self.event_obj.set()
        # Without the lock, because `on_end` runs code of the waiter.
        if self.wakeup is not None:
            self.wakeup.notify()
        if self._on_end is not None:
            self._on_end()
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds; return whether it has ended. Never wait for a loop that has ended."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self.event_obj.wait(max(0.0, min(CHECK_SECONDS, end - time.monotonic()))):
            if time.monotonic() >= end:
                return False
            self.end_if_lost()
        return True

    def end_if_lost(self) -> None:
        """End it if the loop no longer will; waiters call this about every second."""
        inbox, error = self._inbox, failure(self.sequence.error)
        if inbox is None or self.is_finished:
            return
        if inbox.is_closed:
            self.finished(error or inbox.closed_error())
        elif inbox.has_lost(self):
            # The loop may be about to end it, so only the second check in a row counts.
            if self._was_lost:
                log.error("the completion of a request was lost, and has been recovered")
                self.finished(error)
            self._was_lost = True

    def wait_for_completion(self, timeout: float | None = None) -> str:
        """Return prompt and generated text within `timeout` seconds, or raise InferenceError."""
        if not self.wait(timeout):
            self.cancel(timeout_error(timeout or 0.0))
        if self.error is not None:
            raise self.error
        return self.prompt + self.answer

    def cancel(self, error: InferenceError | None = None) -> None:
        """End it now; its slot and pages are freed within one iteration."""
        cancel_all([(self, error or InferenceError("cancelled", "the request was cancelled"))])

    def end_early(self) -> None:
        """End it now, as finished, with the tokens it has."""
        if self._end(None, early=True) and self._inbox is not None:
            self._inbox.remove([self])


def cancel_all(errors: Iterable[tuple[Inference, InferenceError]]) -> None:
    """End inferences with these errors; their slots and pages are freed within one iteration."""
    ended = [inference for inference, error in errors if inference._end(error, early=False)]
    for inbox in {inference._inbox for inference in ended}:
        if inbox is not None:
            inbox.remove([inference for inference in ended if inference._inbox is inbox])


def timeout_error(seconds: float) -> InferenceError:
    """Return the error for a request that exceeded the server's time limit."""
    return InferenceError(
        "timeout_error",
        f"timed out: no answer within {seconds:g} s. Request fewer tokens, try again later, or raise --request-timeout",
    )


def outcome(inference: Inference) -> str:
    """Return how a finished inference ended: stop, length, or the kind of its error."""
    if inference.error is None and inference.sequence.error is None:
        return inference.sequence.finish_reason or "cancelled"
    error = inference.error or failure(inference.sequence.error)
    assert error is not None
    return error.kind


def failure(error: BaseException | None) -> InferenceError | None:
    """Return the error to report to the caller for a sequence's error."""
    if error is None or isinstance(error, InferenceError):
        return error
    if reason := getattr(error, "reason", None):
        return InferenceError("server_error", f"the answer cannot go on: {reason}. Ask for a simpler form")
    return InferenceError(
        "server_error",
        f"the model failed on this request: {type(error).__name__}. Try again; if it still fails, send another prompt",
    )

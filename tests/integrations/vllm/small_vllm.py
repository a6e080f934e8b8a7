"""A stand-in of the part of vLLM that the adapter changes: the loop over running and waiting requests, and nothing else."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch


class Status(Enum):
    (
        WAITING,
        RUNNING,
        PREEMPTED,
        FINISHED_STOPPED,
        FINISHED_LENGTH_CAPPED,
        FINISHED_ABORTED,
        FINISHED_ERROR,
        FINISHED_REPETITION,
    ) = range(8)


class OwnQueue(deque[Any]):
    add_request, pop_request, prepend_request, remove_request = (
        deque.append,
        deque.popleft,
        deque.appendleft,
        deque.remove,
    )

    def peek_request(self) -> Any:
        return self[0]

    def remove_requests(self, gone: list[Any]) -> None:
        for one in [one for one in self if one in gone]:
            self.remove(one)


class Request(SimpleNamespace):
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def num_output_tokens(self) -> int:
        return len(self._output_token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def is_finished(self) -> bool:
        return self.status.name.startswith("FINISHED")


def request(id: str, prompt: int = 4, tokens: int = 3, **extra: Any) -> Request:
    return Request(
        request_id=id, num_prompt_tokens=prompt, max_tokens=tokens, arrival_time=time.time(), priority=0, lora_request=None, session_id=None,
        cache_salt=None, use_structured_output=False, block_hashes=[], prompt_token_ids=None, client_index=0, _output_token_ids=[],
        num_computed_tokens=0, num_output_placeholders=0, status=Status.WAITING, sampling_params=SimpleNamespace(extra_args=extra, logprobs=None),
    )  # fmt: skip


class SmallScheduler:
    """Blocks of 4 tokens; its `kv_cache_manager` and `block_pool` are itself."""

    def __init__(self, slots: int = 2, tokens: int = 64, blocks: int = 100) -> None:
        self.max_num_running_reqs, self.max_num_scheduled_tokens, self.num_gpu_blocks = slots, tokens, blocks
        self.block_size, self.max_model_len, self.connector = 4, 1000, None
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.waiting: Any = OwnQueue()
        self.deferred_waiting: set[Any] = set()
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.kv_cache_manager = self.block_pool = self

    def get_computed_blocks(self, request: Any) -> tuple[Any, int, int]:
        return SimpleNamespace(blocks=([],)), 0, 0

    def get_num_free_blocks(self) -> int:
        return self.num_gpu_blocks - 1 - sum(-(-one.num_computed_tokens // 4) for one in self.running)

    def _holds_kv_blocks(self, request: Any) -> bool:
        return bool(request.num_computed_tokens > 0)

    def _is_blocked_waiting_status(self, status: Status) -> bool:
        return False

    def add_request(self, request: Any) -> None:
        self.waiting.add_request(request)
        self.requests[request.request_id] = request

    def finish_requests(self, id: str, status: Status) -> None:
        if (request := self.requests.get(id)) is not None:
            (self.running if request.status is Status.RUNNING else self.waiting.own).remove(request)
            request.status = status
            self._free_request(request)

    def _free_request(self, request: Any) -> None:
        del self.requests[request.request_id]

    def _preempt_request(self, request: Any, at: float) -> None:
        request.status, request.num_computed_tokens = Status.PREEMPTED, 0
        self.waiting.prepend_request(request)

    def _reserve_prefill_lookahead(self, request: Any, computed: int, tokens: int) -> int:
        return tokens

    def schedule(self, throttle: bool = False) -> Any:
        counts: dict[str, int] = {}
        left, preempted = self.max_num_scheduled_tokens, False
        for one in list(self.running):
            tokens = self._reserve_prefill_lookahead(
                one, one.num_computed_tokens, min(left, one.num_tokens - one.num_computed_tokens)
            )
            while tokens and one in self.running and self._short(one, tokens):
                self._preempt_request(self.running.pop(), 0.0)
                preempted = True
            if tokens and one in self.running:
                counts[one.request_id], left = tokens, left - tokens
        while left > 0 and not preempted and self.waiting and len(self.running) < self.max_num_running_reqs:
            one = self.waiting.peek_request()
            tokens = self._reserve_prefill_lookahead(one, 0, min(left, one.num_tokens))
            if not tokens or self._short(one, tokens):
                break
            self.running.append(self.waiting.pop_request())
            one.status = Status.RUNNING
            counts[one.request_id], left = tokens, left - tokens
        for id, tokens in counts.items():
            self.requests[id].num_computed_tokens += tokens
        return SimpleNamespace(num_scheduled_tokens=counts)

    def _short(self, one: Any, tokens: int) -> bool:
        have = -(-one.num_computed_tokens // 4) if one in self.running else 0
        return -(-(one.num_computed_tokens + tokens) // 4) - have > self.get_num_free_blocks()

    def _update_request_with_output(self, request: Any, ids: list[int]) -> tuple[list[int], bool]:
        request._output_token_ids += ids
        return ids, request.num_output_tokens >= request.max_tokens

    def update_from_output(self, output: Any, model: Any) -> dict[int, Any]:
        for id in output.num_scheduled_tokens:
            one = self.requests.get(id)
            if (
                one is not None
                and one.num_computed_tokens == one.num_tokens
                and self._update_request_with_output(one, [7])[1]
            ):
                one.status = Status.FINISHED_LENGTH_CAPPED
                self.running.remove(one)
                self._free_request(one)
        return {}


class Outputs:
    def __init__(self) -> None:
        self.outputs: list[Any] = []


@contextmanager
def small_vllm() -> Iterator[ModuleType]:
    """Return the adapter over the stand-in."""
    contents: dict[str, dict[str, Any]] = {
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": SmallScheduler},
        "vllm.v1.engine": {"EngineCoreOutput": lambda id, ids, **more: id, "EngineCoreOutputs": Outputs, "FinishReason": SimpleNamespace(ABORT=2, ERROR=3)},
        "vllm.v1.request": {"RequestStatus": Status},
    }  # fmt: skip
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched", *contents)}
    for name, values in contents.items():
        vars(modules[name]).update(values)
    with patch.dict(sys.modules, modules):
        sys.modules.pop("integrations.vllm.scheduler", None)
        yield import_module("integrations.vllm.scheduler")
        sys.modules.pop("integrations.vllm.scheduler", None)

"""A policy as vLLM's scheduler: `--scheduler-cls eb_vllm.PolicyScheduler`, which `./eb vllm serve` sets.

vLLM keeps everything that correctness depends on: blocks, grammars, adapters, preemption, outputs. This project's own
`Scheduler` plans each step beside it, on views of vLLM's requests. vLLM's `schedule`, which is not copied, is steered to that
step in four places:

    self.waiting                 a queue that shows vLLM only those that have joined by the plan, in its order
    _reserve_prefill_lookahead   called for each request with its number of tokens: cut to the plan's
    self.running[-1]             the victim when blocks run out: the policy's victim is moved to the end
    _preempt_request             called before the step for requests that the policy preempts, as reset_prefix_cache does

The plan is then corrected to what vLLM did, and committed with vLLM's outputs. `failsafe.py` handles policies that fail.
No other file uses names of vLLM that are not public.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from integrations.vllm.between import Blocks, Queue
from integrations.vllm.failsafe import Failsafe
from scheduling.advance import TokenRun
from scheduling.hooks import overrides
from scheduling.iteration import Plan
from scheduling.policy import PolicyError
from scheduling.sequence import Sequence

SETTINGS = "EB_VLLM"  # the variable with the policy, its options and the record, as JSON
REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop", RequestStatus.FINISHED_REPETITION: "stop", RequestStatus.FINISHED_LENGTH_CAPPED: "length",
}  # fmt: skip
REFUSED = "refused_by_policy"  # stop_reason of a request that the policy refused


class PolicyScheduler(Failsafe, AsyncScheduler):  # type: ignore[misc]
    """vLLM's scheduler with the decisions of a policy."""

    waiting: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.connector is not None:
            raise ValueError("policies cannot see requests that await a KV connector. Leave out --kv-transfer-config")
        self.lost: list[str] = []  # those that lost their blocks
        self._blocked: list[Any] = []  # new requests whose grammar is being compiled: the policy does not see them yet
        self._plan: Plan | None = None
        self._counts = dict[str, int]()  # what it computes
        self._planned = deque[tuple[Any, Plan | None]]()  # vLLM's steps that are not computed yet
        self._refused: list[Any] = []
        self._ending: dict[Sequence, str] = {}
        self._is_updating = False
        self.waiting = Queue(self, self.waiting)
        sizes = {
            "slots": self.max_num_running_reqs, "page_size": self.block_size, "tokens": self.max_num_scheduled_tokens,
            "pages": self.kv_cache_manager.block_pool.num_gpu_blocks - 1, "context": self.max_model_len,
        }  # fmt: skip
        self.start_policy(json.loads(os.environ.get(SETTINGS, "{}")), sizes, Blocks(self))

    def on_give_up(self) -> None:
        self.waiting.line = None
        self._planned.clear()

    # Arrivals and departures

    def add_request(self, request: Any) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new and self.plans is not None:
            self._blocked.append(request)

    def _take_in(self, now: float) -> None:
        """Report new requests to the policy once vLLM could compute them."""
        blocked, self._blocked = self._blocked, []
        for request in blocked:
            if request.is_finished():
                continue
            if self._is_blocked_waiting_status(request.status) and not self._handle_blocked_waiting_request(request):
                self._blocked.append(request)
                continue
            self.deferred_waiting.discard(request)
            seq = self.views[request.request_id] = self._view(request)
            self.record.arrival(seq)
            if not self.add(seq, now):
                self._turn_away([seq])

    def _view(self, request: Any) -> Sequence:
        """Return a request as a policy sees it; the middleware puts the client into its extra arguments."""
        extra = (request.sampling_params and request.sampling_params.extra_args) or {}
        slo, prompt = extra.get("slo_s"), request.prompt_token_ids or [0] * request.num_prompt_tokens
        return Sequence(
            prompt, request.max_tokens, request.request_id, request.arrival_time, client=str(extra.get("client", "")),
            priority=request.priority, deadline=None if slo is None else request.arrival_time + float(slo),
            # vLLM replaces a length that a client did not name by what the context leaves.
            open_ended=request.max_tokens >= self.max_model_len - request.num_prompt_tokens,
            adapter=request.lora_request.lora_name if request.lora_request else "", session=request.session_id or "",
            program=str(extra.get("program", "")),
            constrained=request.use_structured_output, cache_salt=request.cache_salt or "",
            hashes=list(request.block_hashes[: (len(prompt) - 1) // self.block_size]), sampling=request,
        )  # fmt: skip

    def _turn_away(self, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            self._refused.append(self.requests[seq.id])  # the outputs of this step tell its client
            self.finish_requests(seq.id, RequestStatus.FINISHED_ABORTED)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Handle the end of any request; its status has the reason."""
        seq = self.views.get(request.request_id)
        if seq is not None:
            self.safely(self._end, seq, request)
        return super()._free_request(request, *args, **kwargs)

    def _end(self, seq: Sequence, request: Any) -> None:
        reason = REASONS.get(request.status, "abort")
        total = request.num_output_tokens
        if self._is_updating and reason != "abort" and total > len(seq.output_ids):  # the commit that follows ends it
            seq.stop = lambda token: reason if len(seq.output_ids) >= total else None
            self._ending[seq] = reason
        else:
            self._remove(seq, reason, time.time())

    def _remove(self, seq: Sequence, reason: str, now: float) -> None:
        for one in self.plans.remove_all([seq], now, reason) or [seq]:
            self.views.pop(one.id, None)
        self.record.write({"cancel": seq.id, "now": now, "reason": seq.finish_reason})

    # A step

    def schedule(self, throttle_prefills: bool = False) -> Any:
        now, self._plan = time.time(), None
        self.safely(self._prepare, now)
        output = super().schedule(throttle_prefills)
        self.safely(self._follow, output.num_scheduled_tokens, now)
        self.waiting.line = None
        if self.plans is not None:
            self._planned.append((output, self._plan))
        return output

    def _prepare(self, now: float) -> None:
        """Plan the step, and steer vLLM to it."""
        self.look_for_switch(now)
        self._take_in(now)
        self._give_back(None, now)
        try:
            self._plan = self._planned_step(now)
        except BaseException as error:
            self.replace(error, now)
            self._plan = self._planned_step(now)
        self._turn_away(self.plans.refused)
        for seq in self._plan.preempted if self._plan else ():
            if (request := self.requests[seq.id]).status == RequestStatus.RUNNING:
                self.running.remove(request)
                self.prev_step_scheduled_req_ids.discard(seq.id)  # if it joins again in this step, it is sent whole
                self._preempt_request(request, time.monotonic())
        self.lost.clear()
        self._counts = {seq.id: n for seq, n in zip(self._plan.sequences, self._plan.counts)} if self._plan else {}
        late = () if self._plan and self._plan.repeats else self.plans.running
        waiting = (seq.sampling for seq in late if seq.finish_reason is None)
        # A streaming session that goes on is in another queue, of those that hold blocks.
        self.waiting.line = deque(
            one for one in waiting if one.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) and not self._holds_kv_blocks(one)
        )  # fmt: skip

    def _planned_step(self, now: float) -> Plan | None:
        if self.plans.waiting:
            self.plans.batch.pages.count()
        plan: Plan | None = self.plans.plan_ahead(now)
        if plan is None and self.plans.waiting and not self.running and self.plans.wake_at(now) is None:
            raise PolicyError("admit: no request joins or runs, and deadline() names no time to ask again")
        used, total = self.plans.batch.pages.usage
        if used + len(self.running) > total and overrides(self.plans.policy, "victim"):
            live = [seq for seq in self.plans.running if seq.sampling in self.running]
            if len(live) > 1 and (victim := self.plans.policy.victim(list(live), now)) in live:
                self.running.remove(victim.sampling)  # vLLM takes the last one
                self.running.append(victim.sampling)
        return plan

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        tokens: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        if self.waiting.line is None:
            return tokens
        count = self._counts.get(request.request_id, 0)
        decodes = num_computed_tokens >= request.num_prompt_tokens and count  # its drafts are vLLM's own
        return tokens if decodes else min(tokens, count)

    def _give_back(self, plan: Plan | None, now: float) -> None:
        """Return requests that vLLM preempted to the waiting queue."""
        lost = dict.fromkeys(self.views[id] for id in self.lost if id in self.views)
        self.lost.clear()
        if gone := [seq for seq in lost if seq.state == "running"]:
            self.plans.preempt(plan or Plan(0, now, [], []), gone, now)

    def _follow(self, counts: dict[str, int], now: float) -> None:
        """Correct the plan to what vLLM did."""
        if (plan := self._plan) is None:
            return
        self._give_back(plan, now)
        if plan.repeats and self._counts == counts:
            return
        plan.repeats = False
        members = [seq for seq in (*plan.sequences, *plan.paused) if seq.state == "running"]
        plan.sequences = [seq for seq in members if seq.id in counts]
        plan.counts = [counts[seq.id] for seq in plan.sequences]
        plan.paused = [seq for seq in members if seq.id not in counts]
        if not plan.sequences and not plan.held:  # nothing to commit: the next step tells who joined
            self.plans.queue.joined[:0], self._plan = plan.joined, None
        self._sync(plan.sequences)

    def _sync(self, rows: list[Sequence]) -> None:
        for seq in rows:
            seq.computed = max(0, seq.sampling.num_computed_tokens - seq.sampling.num_output_placeholders)

    # What came out

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        plan = self._planned_for(scheduler_output)
        self._is_updating = True
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._is_updating = False
        for request in self._refused:
            extra = (request.sampling_params and request.sampling_params.extra_args) or {}
            shows = extra.get("shows_reason") and request.sampling_params.logprobs is None
            # With a token, since vLLM's streams leave out what has none; the middleware answers before it is seen. Where
            # an answer does not show the reason, an error is more honest than an answer without text.
            refusal = EngineCoreOutput(
                request.request_id, [0] if shows else [], stop_reason=REFUSED,
                finish_reason=FinishReason.ABORT if extra.get("shows_reason") else FinishReason.ERROR,
            )  # fmt: skip
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(refusal)
        self._refused = []
        self.safely(self._commit, plan, time.time())
        return outputs

    def _planned_for(self, output: Any) -> Plan | None:
        """Return what was planned for a step of vLLM, which computes them in order; those before it never come."""
        while any(own is output for own, _ in self._planned):
            own, plan = self._planned.popleft()
            if own is output:
                return plan
        return None

    def _commit(self, plan: Plan | None, now: float) -> None:
        plan = plan or Plan(0, now, [], [])
        plan.repeats = plan.repeats and self.plans.is_current(plan)
        if not plan.repeats:  # another step may have ended some since this one was planned
            for seq in plan.sequences:
                if seq.state == "waiting":  # it was preempted while its step was computed
                    seq.output_ids = list(seq.sampling._output_token_ids)
            kept = [(seq, n) for seq, n in zip(plan.sequences, plan.counts) if seq.state == "running"]
            plan.sequences, plan.counts = [seq for seq, _ in kept], [n for _, n in kept]
            plan.paused = [seq for seq in plan.paused if seq.state == "running"]
            plan.held = [seq for seq in plan.held if seq.state == "held"]
            self._sync(plan.sequences)
            later = self._planned[0][0].num_scheduled_tokens if self._planned else {}
            for seq, count in kept:
                if count > 1 and seq.id in later:  # the next chunk is planned already
                    seq.computed = seq.sampling.num_computed_tokens - later[seq.id]
                seq.computed -= count  # the commit adds it
        if plan.sequences or plan.held:
            new = [seq.sampling._output_token_ids[len(seq.output_ids) :] for seq in plan.sequences]
            outputs = [ids[0] if len(ids) == 1 else TokenRun(ids) if ids else None for ids in new]
            if any(len(ids) > 1 for ids in new):
                plan.like = None
            iteration = self.plans.commit(plan, outputs, now)
            if not plan.repeats:
                self._sync(plan.sequences)
            left = [self.views.pop(id) for id, _ in iteration.left]
            if self.plans.record:
                lengths = {"outputs": {seq.id: len(seq.output_ids) for seq in left}}
                self.record.write(iteration.to_dict() | lengths)
        for seq, reason in self._ending.items():
            if seq.finish_reason is None:
                self._remove(seq, reason, now)
        self._ending.clear()
        self.note_errors(now)

"""The policies that make a difference in front of a server that batches by itself, and a sentence on each.

It stands for the package `policies`, and makes policies that decide only what a queue can carry out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import policies
from scheduling.policy import Policy

INSIDE = "same as dynamic here: the difference is within a step, which the upstream decides"
BATCH = "one closed batch after the other, for an upstream that batches statically"
DELAYS = "delays new requests to spare running ones, which the upstream does better itself"
LOOPS = {
    "dynamic": "whoever is next joins as soon as a slot is free",
    "nobatch": "one request at a time, for an upstream without batching",
    "adaptive": "finds the number of slots by the time between tokens, for hosted APIs and unknown upstreams",
    **dict.fromkeys(("baton", "chunked", "prefill-first", "econoserve"), INSIDE),
    **dict.fromkeys(("tgi", "lightllm"), DELAYS),
    **dict.fromkeys(("static", "elastic", "impatient", "fixed", "window", "triton", "bucket", "multibin", "static-exact",
                     "static-global"), BATCH),
}  # fmt: skip
ORDERS = {
    "fcfs": "first come, first served",
    "sjf": "the shortest answer first, by the length that the client names",
    "ssjf": "the shortest answer first, by a length that is learned from the prompts",
    "svf": "the smallest answer x prompt first, for an upstream that is short of memory",
    "boost": "as sjf, but what came long before goes first: a shorter tail",
    "priority": "the most urgent first, by X-Queue-Priority",
    "edf": "the nearest deadline first, by X-Queue-Slo",
    "just-in-time": "the most urgent of those that can still be on time, by X-Queue-Slo",
    "vtc": "clients get equal numbers of tokens",
    "vtc-pred": "as vtc, but expects each answer's length: better where answers come in one piece",
    "vtc-plas": "as vtc, and of each client the program that has received the least service",
    "drr": "clients take turns, each for a quantum of tokens",
    "hrrn": "the longest wait relative to the prompt's length",
    "rpm": "each client may send so many requests per minute",
    "admission-control": "refuses what would miss its deadline",
    "adapter-affinity": "one model after the other, for an upstream that swaps them",
    "program-fcfs": "the program that began first, by X-Program-Id or X-Session-Id",
    "plas": "the program that has received the least service, by X-Program-Id or X-Session-Id",
    "atlas": "as plas, but calls that run together count once",
    "justitia": "the program that would end first if all shared evenly: short ones first, long ones not too late",
    "program-gittins": "the program most likely to end soon, judging by those that have ended",
}
CACHE = "{} needs to know what the upstream has cached, which it does not tell. Use "
TIMES = "{} goes by the seconds of each step, which the upstream does not tell. Use "
REFUSED = {
    "srpt": "srpt is sjf here: no upstream gives a slot back with its tokens. Use sjf",
    "mlfq": "mlfq has levels without preemption here, since no upstream gives a slot back. Use vtc, or sjf",
    "program-srpt": "program-srpt needs to know future calls, which only a simulator does. Use plas",
    **dict.fromkeys(("lpm", "dlpm", "prefix-tree"), CACHE + "fcfs"),
}
REFUSED_LOOPS = {"concur": CACHE + "dynamic", "time-budget": TIMES + "dynamic", "qoserve": TIMES + "dynamic+edf"}


class Menu:
    """What a server asks the package `policies`."""

    form_of, is_closed = staticmethod(policies.form_of), staticmethod(policies.is_closed)
    start = "./eb queue"  # the command that loads a policy's file
    loops: Mapping[str, str] = LOOPS  # those that mean something, or something else, in front of an upstream
    refused_loops: Mapping[str, str] = REFUSED_LOOPS

    def check_name(self, name: str, *, own: bool = True) -> None:
        """Raise ValueError if there is no such policy, or if it means something else in front of an upstream."""
        if (order := name.rpartition("+")[2]) in REFUSED and "+" in name:
            raise ValueError(REFUSED[order].format(order))
        if (loop := name.partition("+")[0]) in self.refused_loops:
            raise ValueError(self.refused_loops[loop].format(loop))
        policies.check_name(name, own=own, hidden=REFUSED)

    def names(self) -> list[str]:
        """Return the names of the loops, those that mean something first."""
        return [*self.loops, *(name for name in policies.names() if name not in {*self.loops, *self.refused_loops})]

    def order_names(self) -> list[str]:
        """Return the names of the orders, without those that are refused."""
        return [*ORDERS, *(name for name in policies.order_names() if name not in ORDERS | REFUSED)]

    def summary(self, name: str) -> str:
        """Return what a loop does in front of an upstream."""
        return self.loops.get(name) or policies.summary(name)

    def order_summary(self, name: str) -> str:
        """Return what an order does in front of an upstream."""
        return ORDERS.get(name) or policies.order_summary(name)

    def get_policy(
        self, name: str, max_batch_size: int = 32, options: Mapping[str, object] | None = None, **more: Any
    ) -> Policy:
        """Return a policy; ValueError for one that means something else in front of an upstream."""
        self.check_name(name, own=more.get("own", True))
        return adapted(policies.get_policy(name, max_batch_size, options, **more))


class Shared(Menu):
    """For a queue in front of servers of this project: they run the loop of a policy, and the queue runs its order."""

    start = "./eb fleet"
    leases = False  # each replica would end its lease at another time
    loops: Mapping[str, str] = {}
    refused_loops: Mapping[str, str] = {}

    def get_policy(
        self, name: str, max_batch_size: int = 32, options: Mapping[str, object] | None = None, **more: Any
    ) -> Policy:
        """Return the queue's part of a policy, under the name of the whole; ValueError also for a fault of the loop."""
        self.check_name(name, own=more.get("own", True))
        (loop, others), (own, of_order) = divided(name, options or {})
        served = policies.get_policy(loop, max_batch_size, others, **more)
        made = super().get_policy(own, max_batch_size, of_order, **more)
        if own != name:
            made.name = served.name + made.name.removeprefix("dynamic")
        return made


def divided(name: str, options: Mapping[str, Any]) -> tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]:
    """Return a policy's loop and options for the servers, and what remains for the queue in front of them.

    That is the order with the loop `dynamic`. A file of the user's own may decide both, so it goes to both as it is.
    """
    first, _, order = name.rpartition("+")
    loop, order = (first, order) if first else (name, "")
    named = {field["name"] for field in policies.form_of(order, is_order=True)} if order else set()
    others = {option: value for option, value in options.items() if option not in named}
    if loop not in policies.names():
        return (loop, others), (name, dict(options))
    of_order = {option: value for option, value in options.items() if option in named}
    return (loop, others), (f"dynamic+{order}" if order else "dynamic", of_order)


def adapted(policy: Policy) -> Policy:
    """Return a policy without what upstreams cannot do: give a slot back, pad steps, or bound them for us."""
    policy.preempts = policy.padded = policy.separate_prefill = False
    policy.max_batched_tokens = Policy.max_batched_tokens
    renew = policy.renew
    policy.renew = lambda: adapted(renew())  # type: ignore[method-assign]
    return policy

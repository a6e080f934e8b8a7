"""What could be changed about a server that was fitted: one setting at a time, how to serve with it, and how to apply it.

A change has the settings that differ from those served: order, loop, slots, tokens_per_step, replicas and router.
This module must not know which changes help.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random
from shlex import quote
from typing import Any

import policies
from costs.cost import Cost
from routing.routers import ROUTERS
from scheduling.hooks import Hooks
from simulate.fitting.fitted import Fitted
from simulate.fleet.fleet import Fleet
from simulate.scenario import Chosen
from simulate.simulator import Run, simulate
from simulate.trace import Trace

Change = Mapping[str, Any]
FACTORS = {"slots": (0.5, 2, 4), "tokens_per_step": (0.25, 0.5, 2, 4)}  # times what was served
HINTS = {"least-loaded": "", "prefix-aware": "prefix", "session-sticky": "client"}  # what a router goes by
WAYS = {
    "order": "./eb queue dynamic+{} --upstream URL", "loop": "{} inside the server, which has no flag for it", "replicas": "{} such servers",
    "router": "a balancer that is {}",
}  # fmt: skip


def serve(fitted: Fitted, change: Change, rows: Trace | None = None, law: Cost | None = None) -> Run:
    """Serve the log's requests, or `rows`, with a change and the fitted law, or `law`; raise what a policy raises."""
    engine = replace(fitted.scenario.engine, **{name: change[name] for name in FACTORS if name in change})
    scenario = replace(
        fitted.scenario, engine=engine, cost=law or fitted.scenario.cost, rows=rows or fitted.scenario.rows
    )
    chosen = chosen_of(fitted, change)
    scheduler, sequences = scenario.fresh(chosen)
    if "length" in scheduler.policy.claims.uses:
        for seq in sequences:
            seq.answer_tokens = 0  # as on a server, which knows the limit and not where the model will end
    if "replicas" not in change:
        return simulate(scheduler, sequences, scenario.cost, scenario.host)
    schedulers = [scheduler, *(engine.scheduler(chosen) for _ in range(change["replicas"] - 1))]
    fleet = Fleet(schedulers, scenario.cost, scenario.host, gaps=False)
    return fleet.run(sequences, ROUTERS[change["router"]](Random(0)))


def chosen_of(fitted: Fitted, change: Change) -> Chosen:
    """Return the policy of a change: the served one with another order, or another loop, and the options that it has."""
    served = fitted.scenario.policies[0]
    loop, _, order = served.name.rpartition("+")
    loop, order = (loop, order) if order in policies.order_names() else (served.name, "")
    name = "+".join(filter(None, (change.get("loop", loop), change.get("order", order))))
    has = {field["name"] for field in policies.form_of(name)}
    return Chosen(name, {option: value for option, value in served.options.items() if option in has})


def changes_of(fitted: Fitted) -> Iterator[Change]:
    """Yield every change of one setting that the server, or a queue or a balancer in front of it, can make."""
    flags, differ = fitted.kind.flags, differing(fitted.scenario.rows)
    for name in policies.order_names():
        policy = policies.get_policy(f"dynamic+{name}")
        # A queue in front neither preempts nor knows the prefix cache.
        inside = Hooks(policy).preempts or "prefix" in policy.claims.uses
        can = not inside or not flags.keys().isdisjoint(("policy", f"order:{name}"))
        # `ssjf` stands for a model that guesses lengths, which is not there.
        if can and not policy.claims.refuses and name not in ("fcfs", "ssjf") and differ.issuperset(policy.claims.uses):
            yield {"order": name}
    for name in FACTORS.keys() & flags.keys():
        yield from ({name: max(1, int(factor * getattr(fitted.scenario.engine, name)))} for factor in FACTORS[name])
    if {"policy", "loop"} & flags.keys():
        for name in policies.names():
            if not policies.is_closed(name) and ("policy" in flags or not policies.get_policy(name).times_steps):
                yield {"loop": name}
    yield from ({"replicas": 2, "router": name} for name, hint in HINTS.items() if not hint or hint in differ)


def own_change(file: str) -> Change:
    """Return the change to a file of the user's, whose order goes before the served loop. ValueError if it is no policy."""
    name = policies.complete(file)
    policies.check_name(name)
    return {"loop": name} if name == file else {"order": file}


def differing(rows: Trace) -> set[str]:
    """Return in what the requests differ, of what orders go by."""
    pages = Counter(page for seen in rows.seen for page in {*seen.pages})
    columns = {name: {getattr(seen, name) for seen in rows.seen} for name in ("client", "priority", "deadline")}
    columns["length"] = {seen.limit or seen.tokens for seen in rows.seen}
    return {name for name, values in columns.items() if len(values) > 1} | {"prefix" for n in pages.values() if n > 1}


def title(change: Change) -> str:
    """Name a change in a few words."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in change.items())


def way_of(fitted: Fitted, change: Change) -> str:
    """Say how to apply a change, and what an order must know that the log does not say."""
    steps, ways = dict(change), {**WAYS, **fitted.kind.flags}
    if "policy" in ways and {"loop", "order"} & steps.keys():
        steps = {
            "policy": chosen_of(fitted, change).name,
            **{k: v for k, v in change.items() if k not in ("loop", "order")},
        }
    each = fitted.log.server.get("parallel", 1)  # a flag is for each engine of a data-parallel server
    steps = {name: quote(str(value // each if name in FACTORS else value)) for name, value in steps.items()}
    words = " and ".join(ways.get(f"{name}:{value}", ways[name]).format(value) for name, value in steps.items())
    uses = chosen_of(fitted, change).policy(1).claims.uses
    if "length" not in uses or any(seen.limit for seen in fitted.scenario.rows.seen):
        return words
    return f"{words} (if max_tokens tells how long an answer will be; the log has no max_tokens)"


def switch_for(fitted: Fitted, change: Change) -> str:
    """Return the command that tests a change on live traffic, at the server or a queue before it; "" if no named policy does."""
    now, then = fitted.scenario.policies[0].name, chosen_of(fitted, change).name
    if "policy" not in fitted.kind.flags:
        now, then = "dynamic", f"dynamic+{change.get('order')}"
    loops, orders = policies.names(), ["", *policies.order_names()]
    named = all(loop in loops and order in orders for loop, _, order in (now.partition("+"), then.partition("+")))
    return f"./eb switch URL {now} {then}" if named and change.keys() <= {"loop", "order"} else ""

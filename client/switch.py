"""Serve live traffic with two policies in turns, and measure which is better for those who sent it.

Nothing is sent. Windows of both policies alternate in random order. The policies are only leased: the one that serves now
comes back at the end, also if this command is killed. The last line on stdout is a receipt: what was predicted, what was
measured, and which clients won or lost.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from rich.console import Console

from terminal.console import EXIT_CODES, FINE, SOME_FAILED, emit_json, leave, say, table_of
from terminal.options import Argument, Command, Number, Option, UsageError, Values

from . import flags
from .display import guarded
from .report import receipt
from .report.receipt import Request, Window
from .send.target import ServerUnreachable, Target

SLACK = 15.0  # seconds of a lease beyond its window
LOOK_EVERY = 2.0  # seconds
SHORTEST, LONGEST, USUAL = 10.0, 120.0, 30.0  # seconds of a window
LATENCIES = 4  # p99 latencies in a window, so that it is not all wash-out
SIMULATION = 90.0  # seconds for a simulation by the server
COMMAND = Command(
    "./eb switch", (__doc__ or "").partition("\n")[0],
    {
        "arguments": [Argument("what", "[URL] A B: a server of this project, ./eb queue or ./eb vllm watch; two policies", nargs=-1, default=[])],
        "options": [
            flags.PORT,
            flags.API_KEY,
            Option("--minutes", "end after M minutes", Number(0.1, 1440, kind=float, name="M"), default=20.0),
            Option("--window", "seconds of a window (default: by the latencies so far)", Number(1, 500, kind=float, name="S")),
            Option("--yes", "do not ask before it begins", None),
        ],
    },
    {"exit codes": EXIT_CODES},
)  # fmt: skip


class Ended(Exception):
    """The experiment cannot go on; the argument says why."""


class Switch:
    """An experiment with one server, whose clock gives all times."""

    def __init__(self, target: Target, arms: dict[str, str]) -> None:
        self._target, self.arms = target, arms
        self.requests: dict[str, Request] = {}
        self.windows: list[Window] = []
        self.lease, self.serves = "", ""  # what this command has, and the name of the policy that serves
        self._next, self.now = 0, 0.0

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Return an answer of the server; raise Ended with its message if it is an error."""
        answer = self._target.ask(method, path, body, SIMULATION)
        try:
            said: dict[str, Any] = answer.json()
            if answer.status_code != 200:
                raise Ended(str(said["error"]["message"]))
        except (ValueError, LookupError, TypeError):
            text = f"{method} {path} has another answer (HTTP {answer.status_code}) than a server of ours"
            raise Ended(text) from None
        return said

    def look(self) -> None:
        """Take in what was served, and raise Ended if another policy serves than this command has chosen."""
        told = self.ask("GET", f"/served?since={self._next}")
        if told["next"] < self._next:
            raise Ended("the server was started again")
        self._next, self.now, before, self.serves = told["next"], told["now"], self.serves, told["policy"]
        for one in (*told["ended"], *told["open"]):
            self.requests[one["id"]] = Request(*(one[name] for name in Request._fields))
        if self.lease and self.serves != before:
            failed = told["last_failure"] or {}
            why = f"{before} failed ({failed['error']})" if failed.get("policy") == before else "the lease was ended"
            raise Ended(f"{why}, and {self.serves} serves again")

    def serve(self, arm: str, seconds: float) -> None:
        """Serve a window with a policy."""
        told = self.ask("PUT", "/policy", {"policy": self.arms[arm], "for_s": seconds + SLACK, "lease": self.lease})
        self.lease, self.serves = told["lease"], told["policy"]
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(LOOK_EVERY, left))
            self.look()
        self.windows.append(Window(arm, told["now"], self.now))

    def predict(self) -> dict[str, float]:
        """Return the change that the server's simulator expects from what was served; raise Ended if it cannot tell."""
        told = self.ask("POST", "/what-if", {"policies": [*self.arms.values()], "count": 400})
        steps = {lane["policy"]: lane["records"] for lane in told["lanes"] if not lane["measured"]}
        lanes = [steps.get(name, ()) for name in self.arms.values()]
        ends = [
            {left["id"]: step["t"] + step["repeat"] * step["seconds"] for step in lane for left in step["left"]}
            for lane in lanes
        ]
        # The answer has the steps until some time. Those that have not left by then, and all after the first of them, are left out.
        rows = [(str(i), one["t"], one["output_tokens"]) for i, one in enumerate(told["requests"])]
        rows = [*takewhile(lambda row: all(row[0] in end for end in ends), rows)]
        a, b = ([Request(id, at, None, end[id], n) for id, at, n in rows] for end in ends)
        if len(rows) < receipt.BLOCKS:
            raise Ended(f"only {len(rows)} requests could be simulated")
        return receipt.predicted(a, b, abs(told["error"]["latency_mean_s"]))

    def measure(
        self, planned: int, seconds: float, before: dict[str, float] | None, console: Console
    ) -> dict[str, Any]:
        """Serve windows until a look tells, or all have passed; return the receipt."""
        found, why = receipt.receipt([], [], self.now, planned), ""
        try:
            for done in range(1, planned + 1):
                for arm in random.sample("AB", 2):
                    self.serve(arm, seconds)
                found = receipt.receipt([*self.requests.values()], self.windows, self.now, planned, before)
                if done == receipt.FEWEST:
                    say(console, receipt.need(found))
                if found["verdict"] == receipt.UNKNOWN and done >= receipt.FEWEST:
                    break
                if found["verdict"] in (receipt.TAKE_B, receipt.KEEP_A) and done in receipt.looks_of(planned):
                    break
        except (Ended, ServerUnreachable) as error:
            why = str(error)
        except KeyboardInterrupt:
            why = "stopped by Ctrl-C"
        if self.lease:
            with contextlib.suppress(Ended, ServerUnreachable):  # the server ends the lease by itself, too
                self.ask("DELETE", f"/policy/lease?lease={self.lease}")
        return {"arms": self.arms, **found, "ended": why}


def run(args: Values, console: Console) -> int:
    """Predict, ask, measure, and show the receipt."""
    has_url = bool(args.what) and flags.is_address(args.what[0])
    url, names = (args.what[0] if has_url else flags.LOCAL), args.what[has_url:]
    if len(set(names)) != 2 or len(names) != 2:
        raise UsageError("name two policies, as in ./eb switch [URL] dynamic dynamic+sjf")
    target = Target(flags.at_port(flags.base_url(url), args.port), api_key=args.api_key)
    switch, before = Switch(target, dict(zip("AB", names))), None
    try:
        switch.look()
    except Ended as error:
        raise UsageError(str(error)) from None
    try:
        before = switch.predict()
        say(console, f"predicted change of {receipt.GOAL} from {names[0]} to {names[1]}: {shown(before)} %")
    except Ended as error:
        say(console, f"no prediction: {error}")
    waited = receipt.latencies([*switch.requests.values()], switch.now)
    usual = min(LONGEST, max(SHORTEST, LATENCIES * float(np.percentile(waited, 99)))) if waited else USUAL
    seconds = args.window or usual
    planned = max(1, int(args.minutes * 60 / (2 * seconds)))
    say(console, f"{target.url} will serve all its clients with {names[0]} (A) and {names[1]} (B) in turns of {seconds:.0f} s, for at "
        f"most {planned * 2 * seconds / 60:.0f} minutes. Then {switch.serves} serves again, also after Ctrl-C")  # fmt: skip
    if not args.yes:
        if not sys.stdin.isatty():
            raise UsageError("there is no terminal to ask for confirmation. Use --yes to begin")
        if input("Begin? [y/N] ").strip().lower() not in ("y", "yes"):
            return FINE
    found = switch.measure(planned, seconds, before, console)
    show(console, found)
    emit_json(json.loads(json.dumps(found), parse_constant=lambda name: None))  # JSON has no infinity
    return SOME_FAILED if found["ended"] else FINE


def shown(found: dict[str, float]) -> str:
    """Return a change with its interval, in percent."""
    change, low, high = (f"{100 * found[name]:+.{abs(found[name]) < 1:d}f}" for name in ("change", "low", "high"))
    return f"{change} ({low} to {high})" if math.isfinite(found["high"]) else f"{change} (too few)"


def show(console: Console, found: dict[str, Any]) -> None:
    """Print the receipt: the figures, then the clients."""
    rows = [
        (name, f"{one['a']:.3g}", f"{one['b']:.3g}", shown(one),
         f"{shown(one['predicted'])} {'held' if one['held'] else 'missed'}" if "held" in one else one.get("result", ""))
        for name, one in [*found["figures"].items(), *((one["client"] or "(no name)", one) for one in found["clients"])]
    ]  # fmt: skip
    title = f"{found['requests']:,} requests in {found['pairs']} pairs of windows; times in s, clients: {receipt.GOAL}"
    heads = ("what", "A", "B", "change % (95 %)", "predicted, or with B")
    if found["pairs"]:
        console.print(table_of(title, heads, rows))
    if found["ended"]:
        say(console, f"ended early: {found['ended']}")
    say(console, f"{found['verdict']} (A {found['arms']['A']}, B {found['arms']['B']})")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return guarded(lambda console: run(flags.parse(COMMAND, arguments, os.environ), console))


if __name__ == "__main__":
    leave(main())

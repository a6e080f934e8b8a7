"""Serve live traffic with two policies in turns, and measure which is better for those who sent it.

Nothing is sent. Windows of both policies alternate in random order. The policies are only leased: the one that serves now
comes back at the end, also if this command is killed. The last line on stdout is a receipt: what was predicted, what was
measured, and which clients won or lost.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import sys
import time
from collections.abc import Mapping
from io import StringIO
from itertools import takewhile
from typing import Any

import numpy as np
from rich.console import Console

from terminal.console import EXIT_CODES, FINE, SOME_FAILED, emit_json, leave, say, table_of, writable
from terminal.options import FILE, Argument, Command, Number, Option, UsageError, Values

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
            flags.GOODPUT,
            Option("--window", "seconds of a window (default: by the latencies so far)", Number(1, 500, kind=float, name="S")),
            Option("--report", "write the receipt as a page, too", FILE, metavar="FILE.html"),
            Option("--yes", "do not ask before it begins", None),
        ],
    },
    {"exit codes": EXIT_CODES},
)  # fmt: skip


class Ended(Exception):
    """The experiment cannot go on; the argument says why."""


class Switch:
    """An experiment with one server, whose clock gives all times."""

    def __init__(self, target: Target, arms: dict[str, str], limits: Mapping[str, float] | None = None) -> None:
        self._target, self.arms, self._limits = target, arms, limits
        self._options: dict[str, Any] = {}  # of the arms that have served
        self._failure: Any = None  # the last one of any policy before this command had a lease
        self.requests: dict[str, Request] = {}
        self.windows: list[Window] = []
        self.lease, self.serves = "", ""  # what this command has, and the name of the policy that serves
        self._next, self.now = 0, 0.0

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Return an answer of the server; raise Ended with its message if it is an error."""
        answer = self._target.ask(method, path, body, SIMULATION)
        try:
            said: dict[str, Any] = answer.json()
            error = "" if {"policy", "lanes"} & said.keys() else str(said["error"]["message"])
        except (ValueError, LookupError, TypeError, AttributeError):
            error = f"{method} {path} has another answer (HTTP {answer.status_code}) than a server of ours"
            raise Ended(error) from None
        if error:
            raise UsageError(error) if said["error"].get("param") == "policies" else Ended(error)
        return said

    def look(self) -> bool:
        """Take in what was served; return whether there is a lease. Raise Ended if requests are missing, or another policy serves."""
        told = self.ask("GET", f"/served?since={self._next}")
        if told["next"] < self._next:
            raise Ended("the server was started again")
        if told["lost"] and self.lease:
            raise Ended(f"{told['lost']:,} requests ended between two looks and are no longer kept by the server")
        if told["lost"]:
            self.requests.clear()  # also those whose end is not known
        self._next, self.now, before, self.serves = told["next"], told["now"], self.serves, told["policy"]
        if not self.lease:
            self._failure = told["last_failure"]
        for one in (*told["ended"], *told["open"]):
            self.requests[one["id"]] = Request(*(one[name] for name in Request._fields))
        if self.lease and self.serves != before:
            failed = told["last_failure"] if told["last_failure"] != self._failure else {}
            why = f"{before} failed ({failed['error']})" if failed.get("policy") == before else "the lease was ended"
            raise Ended(f"{why}, and {self.serves} serves again")
        return bool(told["leased"])

    def serve(self, arm: str, seconds: float) -> None:
        """Serve a window with a policy."""
        told = self.ask("PUT", "/policy", {"policy": self.arms[arm], "for_s": seconds + SLACK, "lease": self.lease})
        self.lease, self.serves, self._options[arm] = told["lease"], told["policy"], told["options"]
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(LOOK_EVERY, left))
            self.look()
        self.windows.append(Window(arm, told["now"], self.now))

    def predict(self) -> dict[str, dict[str, float]]:
        """Return the changes that the server's simulator expects from what was served; raise Ended if it cannot tell."""
        others = [name for name in self.arms.values() if name != self.serves]  # that which serves is simulated as it is
        told = self.ask("POST", "/what-if", {"policies": others, "count": 400})
        simulated = {lane["policy"]: lane for lane in told["lanes"] if not lane["measured"]}
        failed = sum(one.failed for one in self.requests.values()) / max(1, len(self.requests))
        if failed > receipt.MOST_FAILED or not all(simulated[name]["whole"] for name in self.arms.values()):
            raise Ended("requests fail or are refused, of which a simulation tells nothing")
        lanes = [simulated[name]["records"] for name in self.arms.values()]

        def ends_of_steps(kind: str) -> list[dict[str, float]]:
            """Return for both lanes when the last step ended in which a request left, or a part of its prompt was computed."""
            return [
                {one["id"]: step["t"] + step["repeat"] * step["seconds"] for step in lane for one in step[kind]
                 if one.get("phase") in (None, "prefill")} for lane in lanes
            ]  # fmt: skip

        ends, firsts = ends_of_steps("left"), ends_of_steps("members")
        # The answer has the steps until some time. Those that have not left by then, and all after the first of them, are left out.
        rows = [(str(i), one["t"], one["output_tokens"]) for i, one in enumerate(told["requests"])]
        rows = [*takewhile(lambda row: all(row[0] in end for end in ends), rows)]
        a, b = ([Request(id, at, first.get(id), end[id], n) for id, at, n in rows] for first, end in zip(firsts, ends))
        if len(rows) < receipt.BLOCKS:
            raise Ended(f"only {len(rows)} requests could be simulated")
        return receipt.predicted(a, b, abs(told["error"]["latency_mean_s"]), self._limits)

    def measure(
        self, planned: int, seconds: float, before: dict[str, dict[str, float]] | None, console: Console
    ) -> dict[str, Any]:
        """Serve windows until a look tells, or all have passed; return the receipt."""

        def receipt_now() -> dict[str, Any]:
            seen = [*self.requests.values()]
            found = receipt.receipt(seen, self.windows, self.now, planned, before, self._limits)
            return {"arms": self.arms, "options": self._options, **found}

        found, why, looks = receipt_now(), "", receipt.looks_of(planned)
        try:
            self.look()  # what ended meanwhile may no longer be kept
            for done in range(1, planned + 1):
                for arm in random.sample("AB", 2):
                    self.serve(arm, seconds)
                if done not in (receipt.FEWEST, *looks):
                    continue
                found = receipt_now()
                if done == receipt.FEWEST:
                    say(console, receipt.need(found))
                if found["verdict"] == receipt.UNKNOWN:
                    break
                if found["verdict"] in (receipt.TAKE_B, receipt.KEEP_A) and done in looks:
                    break
        except (Ended, ServerUnreachable) as error:
            why = str(error)
        except KeyboardInterrupt:
            why = "stopped by Ctrl-C"
        found = (found if found["done"] == len(self.windows) // 2 else receipt_now()) | {"ended": why}
        if self.lease:
            with contextlib.suppress(Ended, ServerUnreachable):  # the server ends the lease by itself, too
                self.ask("POST", "/policy/receipt", {"lease": self.lease, "lines": receipt.lines_of(found)})
                self.ask("DELETE", f"/policy/lease?lease={self.lease}")
        return found


def run(args: Values, console: Console) -> int:
    """Predict, ask, measure, and show the receipt."""
    has_url = bool(args.what) and flags.is_address(args.what[0])
    url, names = (args.what[0] if has_url else flags.LOCAL), args.what[has_url:]
    if len(set(names)) != 2 or len(names) != 2 or not all(names):
        raise UsageError("name two policies, as in ./eb switch [URL] dynamic dynamic+sjf")
    if args.report:
        writable(args.report, "--report")
    target = Target(flags.at_port(flags.base_url(url), args.port), api_key=args.api_key)
    switch, before = Switch(target, dict(zip("AB", names)), dict(args.goodput)), None
    try:
        if switch.look():
            raise Ended("another client has leased the policy. Wait, or end that with DELETE /policy/lease")
    except Ended as error:
        raise UsageError(str(error)) from None
    waited = [receipt.latency(one, switch.now) for one in switch.requests.values()]
    usual = min(LONGEST, max(SHORTEST, LATENCIES * float(np.percentile(waited, 99)))) if waited else USUAL
    seconds = args.window or usual
    planned = int(args.minutes * 60 / (2 * seconds))
    if planned < receipt.TELLING:
        raise UsageError(
            f"{args.minutes:g} min have {planned} pairs of windows of {seconds:.0f} s, and {receipt.TELLING} are the fewest that "
            f"can tell. Use --minutes {math.ceil(receipt.TELLING * 2 * seconds / 6) / 10:g}, or a shorter --window"
        )
    try:
        before = switch.predict()
        for name, change in before.items():
            say(console, f"predicted change of {name} from {names[0]} to {names[1]}: {receipt.shown(change)} %")
    except Ended as error:
        say(console, f"no prediction: {error}")
    except ServerUnreachable:  # a simulation takes long where the processor has no time for it
        say(console, f"no prediction: no answer within {SIMULATION:.0f} s")
    say(console, f"{target.url} will serve all its clients with {names[0]} (A) and {names[1]} (B) in turns of {seconds:.0f} s, for at "
        f"most {planned * 2 * seconds / 60:.3g} min. Then {switch.serves} serves again, also after Ctrl-C")  # fmt: skip
    if not args.yes:
        if not sys.stdin.isatty():
            raise UsageError("there is no terminal to ask for confirmation. Use --yes to begin")
        say(console, "Begin? [y/N]")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return FINE
    found = switch.measure(planned, seconds, before, console)
    show(console, found)
    emit_json(json.loads(json.dumps(found), parse_constant=lambda name: None))  # JSON has no infinity
    if args.report:
        page = Console(record=True, file=StringIO(), width=100)
        show(page, found)
        writable(args.report, "--report")  # its folder may be gone
        page.save_html(str(args.report))
    return SOME_FAILED if found["ended"] else FINE


def show(console: Console, found: dict[str, Any]) -> None:
    """Print the receipt: the figures, then the clients."""
    (title,), heads, *rows, (verdict,) = receipt.lines_of(found)
    if rows:
        console.print(table_of(title, heads, rows))
    say(console, verdict)


@guarded
def main(console: Console, argv: list[str], environ: Mapping[str, str]) -> int:
    """Run the command and return its exit code."""
    return run(flags.parse(COMMAND, argv, environ), console)


if __name__ == "__main__":
    leave(main())

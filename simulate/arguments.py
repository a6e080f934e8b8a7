"""What the commands share: flags that describe engine and arrivals, and what is made of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime, timezone
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

import policies
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from simulate import costs, workloads
from simulate.costs import Cost, Host, Padded, Ragged

PAGE_SIZE = 16


class UsageError(ValueError):
    """What was asked cannot be done; the words say what can."""


class Parser(argparse.ArgumentParser):
    """Answers a mistyped flag with the nearest one, in one line; flags are not guessed from their beginnings."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        flags = [flag for action in self._actions for flag in action.option_strings]
        wrong = message.rpartition(": ")[2].split()[0] if "unrecognized" in message else ""
        near = get_close_matches(wrong.split("=")[0], flags, 1)
        guess = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(f"{message}.{guess} Use --help")


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def options(pairs: Sequence[str], flag: str) -> dict[str, str]:
    """Read name=value pairs."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"{flag} is {pair!r}, must be name=value. Use {flag} {pair}=1")
        found[name] = value
    return found


def add_engine(parser: argparse.ArgumentParser, with_policies: bool = True) -> None:
    """Add what describes the engine: policies, cost, room."""
    group = parser.add_argument_group("engine")
    if with_policies:
        parser.add_argument(
            "policies",
            nargs="+",
            metavar="POLICY",
            help=f"loop or loop+order: {', '.join(policies.names())}",
        )
        group.add_argument(
            "--policy-option",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="may be repeated",
        )
    group.add_argument(
        "--cost",
        default="oracle-a",
        help="a named model, or a file of `calibrate` (default %(default)s)",
    )
    group.add_argument(
        "--cost-option", action="append", default=[], metavar="NAME=VALUE", help="may be repeated"
    )
    group.add_argument(
        "--engine",
        choices=("as-is", "ragged", "padded"),
        default="as-is",
        help="what padding costs (default: as the policy has it)",
    )
    group.add_argument("--max-batch-size", type=int, default=32, help="slots (default %(default)s)")
    group.add_argument(
        "--max-tokens-per-step", type=int, default=2048, help="(default %(default)s)"
    )
    group.add_argument("--kv-tokens", type=int, default=0, help="tokens of KV pages; 0: without end (default)")  # fmt: skip


def add_workload(parser: argparse.ArgumentParser, num: int = 1000) -> None:
    """Add what describes the arrivals."""
    group = parser.add_argument_group("arrivals")
    group.add_argument(
        "--workload",
        default="clipped-normal",
        help=f"{', '.join(workloads.LENGTHS)} (default %(default)s)",
    )
    group.add_argument(
        "--arrivals",
        default="poisson",
        help=f"{', '.join(workloads.ARRIVALS)} (default %(default)s)",
    )
    group.add_argument(
        "--rate", type=float, default=2.0, help="requests a second (default %(default)s)"
    )
    group.add_argument("--num", type=int, default=num, help="requests (default %(default)s)")
    group.add_argument("--trace", type=Path, help="a CSV or JSON-lines file instead")
    group.add_argument("--speed", type=float, default=1.0, help="of a trace (default %(default)s)")
    group.add_argument(
        "--context", type=int, default=0, help="leave out what does not fit so many tokens"
    )
    group.add_argument("--seed", type=int, default=0, help="of all chance (default %(default)s)")  # fmt: skip


def make_cost(args: argparse.Namespace) -> tuple[Cost, Host]:
    numbers = {}
    for name, value in options(args.cost_option, "--cost-option").items():
        try:
            numbers[name] = float(value)
        except ValueError:
            raise UsageError(
                f"--cost-option {name} is {value!r}, must be a number. Use {name}=0.01"
            ) from None
    cost = costs.make(args.cost, numbers)
    host = costs.load(args.cost)[1] if args.cost.endswith(".json") else Host()
    return {"as-is": lambda c: c, "ragged": Ragged, "padded": Padded}[args.engine](cost), host


def make_scheduler(args: argparse.Namespace, policy: str, slots: int = 0) -> Scheduler:
    given = options(args.policy_option, "--policy-option")
    made = policies.get_policy(policy, max_batch_size=slots or args.max_batch_size, options=given)
    pages = (
        PagePool(args.kv_tokens // PAGE_SIZE + 1, PAGE_SIZE, prefix_cache=False)
        if args.kv_tokens
        else None
    )
    return Scheduler(made, pages, args.max_tokens_per_step)


def make_rows(args: argparse.Namespace) -> workloads.Rows:
    if args.trace:
        rows = workloads.read(args.trace, args.context or None).faster(args.speed)
    else:
        rows = workloads.draw(args.workload, args.rate, args.num, args.seed, args.arrivals)
    if args.kv_tokens and (most := int((rows.prompt + rows.output).max())) > args.kv_tokens:
        raise UsageError(
            f"a request has {most:,} tokens, there is room for {args.kv_tokens:,}. Raise --kv-tokens"
        )
    return rows


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what repeats a run."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in ("act", "out", "command_line")
    }


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")

"""Simulate batching policies without a model. Text goes to stderr; unless stdout is a terminal, its last line is one JSON
object."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from traceback import walk_tb
from types import ModuleType

from rich.console import Console

from scheduling.hook_limit import HookTimeout
from scheduling.located import failure, locate
from scheduling.scheduler import PolicyError
from simulate.hook_limit import limited
from terminal.console import emit_json, say
from terminal.options import Argument, Choice, Command, UsageError, read
from terminal.removed import removed

COMMANDS = {
    "new": "Write a policy file to start from.",
    "try": "Check a policy file and run it beside the loop that it derives from: a verdict in seconds.",
    "run": "Serve a workload with one or more policies and report the result of each.",
    "sweep": "Serve a workload at several rates on the virtual clock, once for each seed, and draw latency and throughput.",
    "plan": "Find the highest rate that each policy sustains, and the replicas that a rate needs.",
    "arena": "Rank all policies and your own over many workloads.",
    "papers": "Compute the published factors of policies again, and say which agree.",
    "grade": "Check and score policy files for a lesson of docs/tutorial.",
    "fleet": "Serve a workload with many replicas behind a router.",
    "prefix": "Compare prefix caches: hits, TTFT and TPOT by cache and batch size.",
    "calibrate": "Time the engine on this machine, or read the steps of a recorded vLLM, and fit a cost model to them.",
    "probe": "Send any server a designed load of a few minutes, and fit what its steps cost.",
    "fit": "Fit what the steps of any server cost, from a log of its requests.",
    "validate": "Send the same arrivals through a real server and the simulator, side by side.",
    "advise": "Say what other settings would have done to the requests of a log, and check whether it was true.",
    "adversary": "Search for the requests on which a policy does worst, compared with another policy or a bound.",
    "check": "Test a policy on thousands of random cases and report which law it breaks.",
}
OF_EB = ("new", "try", "probe", "fit", "advise")  # listed by ./eb itself
EXAMPLES = """\b
  ./eb simulate run dynamic static --rate 2 --out results/mine
  ./eb simulate calibrate --model bard --out cost.json
  ./eb simulate plan dynamic --cost cost.json --ttft 1 --itl 0.1 --rate 6
  ./eb simulate plan dynamic --trace trace.csv --context 1024 --speed 2
  ./eb simulate run dynamic dynamic+vtc --rate 9 --clients 4
"""


def _module(name: str) -> ModuleType:
    """Return the module of a command, which loads what only this one needs."""
    return import_module(f"simulate.commands.{'try_out' if name == 'try' else name}")


def build_command(name: str) -> Command:
    """Return the command line of one command."""
    module = _module(name)
    if name == "check":  # its help lists the options of all policies
        command: Command = module.build_command()
        return command
    called = f"./eb {name}" if name in OF_EB else f"./eb simulate {name}"
    return Command(called, COMMANDS[name], module.options(), {"": getattr(module, "NOTE", "")})


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command: 0 on success, 1 when a bound or law was broken or a step failed, 2 for a wrong command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    console = Console(stderr=True)
    try:
        command = _command(argv)
        with limited():
            if sum(word.partition("=")[0] == "--seed" for word in argv) > 1:  # the last would count
                raise UsageError("--seed is given twice. Give the first one, and --repeats N for N seeds")
            args = read(build_command(command), argv[1:], os.environ)
            args.command_line = shlex.join(["./eb", "simulate", *argv])
            with redirect_stdout(sys.stderr):  # stdout is for the result alone, and a policy may print
                result = _module(command).run(args, console)
    except KeyboardInterrupt:
        return 130
    except (Exception, HookTimeout) as error:
        place = locate(walk_tb(error.__traceback__))
        in_hook = place is not None and place.hook != "__init__"  # which refuses options
        if isinstance(error, PolicyError) or (in_hook and not isinstance(error, HookTimeout)):
            say(console, f"error: {failure(error)}")
            return 1
        if not isinstance(error, ValueError | OSError | RuntimeError | HookTimeout):
            raise
        if isinstance(error, OSError) and error.filename is not None:
            say(console, f"error: cannot open {error.filename!r}: {error.strerror}. Check the path")
            return 2
        say(console, f"error: {error}")
        return 2 if isinstance(error, ValueError) else 1
    if command == "check":  # its result is a text for people
        say(Console(), str(result))
        return 0 if result.broken is None else 1
    emit_json(result)
    return 0 if result.get("good", True) else 1


def _command(argv: Sequence[str]) -> str:
    """Return the name of the command; print the help and end the process if there is none."""
    if argv and (gone := removed(argv[0])):
        raise UsageError(gone)
    names = Argument("command", "one of the commands below", Choice(COMMANDS, "COMMAND"), required=True)
    more: dict[str, str | Sequence[tuple[str, str]]] = {
        "commands": [row for row in COMMANDS.items() if row[0] not in OF_EB]
    }
    more["examples"] = EXAMPLES
    return str(read(Command("./eb simulate", __doc__ or "", {"arguments": [names]}, more), argv[:1]).command)


if __name__ == "__main__":
    raise SystemExit(main())

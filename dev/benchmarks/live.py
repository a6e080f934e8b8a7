"""Log of one load, prediction of another: what is fitted to one arrival pattern or policy of a live server, tried on others.

    python -m dev.benchmarks.live mock bard --json dev/benchmarks/results/live.json
    python -m dev.benchmarks.live llama.cpp --program build/bin/llama-server --gguf FILE --json live-llama.cpp.json

A server gets a burst, which shows its capacity, a probe, a Poisson load at half of that capacity, and other loads. What is
fitted to the probe, and to the Poisson load, predicts all loads that it did not see, from their arrivals and lengths alone.
Then the server changes its policy, which the fit of the Poisson load, under the first one, predicts as well. llama.cpp's server
has a processor of its own, and gets two loads a second time: no prediction can be closer than that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import requests

from client.send import ask, servers
from costs.cost import Affine, to_dict
from dev.benchmarks import report
from dev.benchmarks.foreign import compared, errors, line
from dev.benchmarks.server import call, started, until
from simulate.engines import known
from simulate.fitting.fit import fit
from simulate.fitting.fitted import Fitted, measured
from simulate.logs.log import Log
from simulate.logs.read import read
from simulate.scenario import Chosen

LAW = Affine(base=0.0203, decode=2.5e-5, prompt=9.2e-5, context=1.5e-7, pair=1e-8)  # about Llama 3.1 8B on an RTX 4090
MODELS = {"mock": "mock:{}@4", "bard": "bard"}
SLOTS, CONTEXT = 8, 1024
BUSIER = 1.5  # times half the capacity, where policies differ
SECONDS = 14.0  # that the arrivals of a load may take
MOST, FEWEST = 200, 32  # requests of a load
CHAT, AGAIN = "clipped-normal", " again"
PATTERNS = {  # workload, arrivals, times half the capacity
    "Poisson": (CHAT, "poisson:{}", 1.0), "on-off": (CHAT, "onoff:{}:5", 1.0), "twice the rate": (CHAT, "poisson:{}", 2.0),
    "long prompts": ("anyscale:64", "poisson:{}", 0.7), "programs": ("agents", "poisson:{}", 0.4),
}  # fmt: skip
POLICIES = ("static", "nobatch", "prefill-first", "dynamic+sjf", "dynamic+hrrn")


@contextlib.contextmanager
def serving(args: argparse.Namespace, name: str, folder: Path) -> Iterator[str]:
    """Run a server of this name on loopback, and yield its URL."""
    if name in MODELS:
        law = Path(folder, "law.json")
        law.write_text(json.dumps({"cost": to_dict(LAW)}))
        flags = ("--model", MODELS[name].format(law), "--max-batch-size", str(SLOTS), "--compute-threads", "1")
        with started("dynamic", *flags) as (port, _):
            yield f"http://127.0.0.1:{port}"
        return
    url = f"http://127.0.0.1:{servers.free_port()}"
    command = [args.program, "--model", args.gguf, "--parallel", str(SLOTS // 2), "--ctx-size", str(SLOTS // 2 * CONTEXT),
               "--threads", "1", "--cache-ram", "0", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]  # fmt: skip
    own, *others = sorted(os.sched_getaffinity(0))  # of the server; the others are for what sends to it
    process = subprocess.Popen(
        ["taskset", "-c", str(own), *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.sched_setaffinity(0, others or {own})

    def ready() -> bool:
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"{url}/health", timeout=5).ok
        return False

    try:
        until(ready, 60)
        yield url
    finally:
        servers.stop(process)


class Server:
    """A running server, and the logs of the loads that it got."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.facts = ask.facts(url)

    def log(self, name: str, workload: str, arrivals: str, count: int) -> Log:
        """Send a load with prompts of its own, which no other one left in the prefix cache, and return its log."""
        file, seed = self.folder / f"{name}.json", crc32(name.removesuffix(AGAIN).encode())
        command = [sys.executable, "-m", "client.client", self.url, "--api", "openai", "--json", str(file), "--seed", str(seed),
                   "--workload", workload, "--load", arrivals, "--numsamples", str(count), "--context", str(CONTEXT), "--warmup", "2"]  # fmt: skip
        if not file.exists():
            subprocess.run(command, check=True, capture_output=True)
        log = read(file)
        return replace(log, server={**log.server, **self.facts})

    def probe(self) -> Fitted:
        """Return what is fitted to a probe."""
        file = self.folder / "probe.jsonl"
        command = [sys.executable, "-m", "simulate", "probe", self.url, "--minutes", "1.2", "--tokens", "30000",
                   "--log", str(file), "--out", str(self.folder / "probe.json")]  # fmt: skip
        if not file.exists():
            subprocess.run(command, check=True, capture_output=True)
        return self.fitted(read(file))

    def loads(self, again: Sequence[str]) -> tuple[dict[str, Log], float]:
        """Return the logs of all patterns, and of those to send `again`, and the rate of half the capacity."""
        burst = self.log("burst", CHAT, "burst", 32)
        rate = len(burst.at) / float(burst.last.max()) / 2
        logs = {"burst": burst}
        for name in (*PATTERNS, *again):
            workload, arrivals, times = PATTERNS[name.removesuffix(AGAIN)]
            count = min(MOST, max(FEWEST // (3 if name == "programs" else 1), round(times * rate * SECONDS)))
            logs[name] = self.log(name, workload, arrivals.format(f"{times * rate:.4g}"), count)
        return logs, rate

    def fitted(self, log: Log) -> Fitted:
        return fit(log, known.get(str(self.facts["engine"])))


def under(fitted: Fitted, policy: str) -> Fitted:
    """Return a fit under another policy of our server."""
    chosen, scenario = Chosen(policy), fitted.scenario
    asked = (chosen.policy(scenario.engine.slots),)
    return replace(fitted, scenario=replace(scenario, policies=(chosen,), asked=asked))


def judged(args: argparse.Namespace, name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the predictions of a server's loads beside the measurements."""
    with serving(args, name, folder) as url:
        server = Server(url, folder)
        again = [] if name in MODELS else [pattern + AGAIN for pattern in ("Poisson", "twice the rate")]
        logs, rate = server.loads(again)
        for second in again:
            pattern = second.removesuffix(AGAIN)
            figures = [measured(log, log.first, log.last, log.first >= 0) for log in (logs[pattern], logs.pop(second))]
            pairs = {figure: [one, figures[1][figure]] for figure, one in figures[0].items()}
            yield {
                "kind": "again",
                "server": name,
                "name": f"{name}: {second}",
                "figures": pairs,
                "doubts": (),
                **errors(pairs),
            }
        for fitted_to, fitted in (("probe", server.probe()), ("Poisson", server.fitted(logs["Poisson"]))):
            for pattern in [each for each in logs if each != fitted_to]:
                found = compared(f"{name}: {fitted_to} to {pattern}", fitted, logs[pattern])
                yield {"kind": "pattern", "server": name, "fitted": fitted_to, "predicted": pattern, **found}
        rate *= BUSIER
        for policy in POLICIES if name in MODELS else ():
            call(int(url.rpartition(":")[2]), "PUT", "/policy", {"policy": policy})
            log = server.log(policy, CHAT, f"poisson:{rate:.4g}", min(MOST, max(FEWEST, round(rate * SECONDS))))
            found = compared(f"{name}: dynamic to {policy}", under(fitted, policy), log)
            yield {"kind": "policy", "server": name, "fitted": "dynamic", "predicted": policy, **found}


def main() -> None:
    parser = report.parser("live", __doc__)
    parser.add_argument("servers", nargs="+", choices=[*MODELS, "llama.cpp"], help="servers to start and to measure")
    parser.add_argument("--program", help="llama-server of llama.cpp")
    parser.add_argument("--gguf", help="model for llama.cpp")
    parser.add_argument("--keep", type=Path, help="folder for the logs; a load whose log is there is not sent again")
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.servers:
            folder = (args.keep or Path(scratch)) / name
            folder.mkdir(parents=True, exist_ok=True)
            for run in judged(args, name, folder):
                runs.append(run)
                print(" | ".join(line(run)), file=sys.stderr, flush=True)
                report.keep(args.json, {"runs": runs})
    report.finish("live", {"runs": runs}, args.json)


if __name__ == "__main__":
    main()

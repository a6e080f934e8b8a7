"""This project beside others that serve the same checkpoint on this machine.

    python -m dev.benchmarks.peers --model smollm2 --work work --formats int8 int4 \\
        --peer vllm=vllm/bin/python --peer openvino=ov/bin/python@int8 \\
        --peer llama.cpp=bin/llama-server@Q4_0

It installs nothing: name what is installed by --peer, once for each format.
All get the same seeded requests (prompts of 8 to 64 words, about 100 tokens
each): W64 is 64 at once, W1 one after the other. Peers without a server are
measured offline, and compared with this project offline. Ratios are medians
of ours, measured before and after the peer, over the median of the peer:
above 1 we are faster.

Peers read a checkpoint as transformers stores it, and llama.cpp a GGUF file.
Name yours by --folder and --gguf, or let --model be written into --work. Keep
--work: what peers convert is there, so that the next run starts sooner.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dev.benchmarks import machine, report
from dev.benchmarks.peers import checkpoint
from dev.benchmarks.peers.hugging_face import Transformers
from dev.benchmarks.peers.llama_cpp import LlamaCpp
from dev.benchmarks.peers.measure import Rates, measure
from dev.benchmarks.peers.openvino import OpenVINO
from dev.benchmarks.peers.ours import NAME, programs
from dev.benchmarks.peers.peer import Job, NotMeasured, Peer
from dev.benchmarks.peers.vllm import VLLM
from dev.benchmarks.quality import formats
from models.sources import catalog
from terminal.console import table_of

PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (VLLM, LlamaCpp, OpenVINO, Transformers)}
Round = dict[str, Any]  # name, format, how, and the rates of one start


def read_peer(text: str, job: Job) -> Peer:
    """Return the peer of NAME=PROGRAM[@FORMAT]. ValueError names what is known."""
    name, _, rest = text.partition("=")
    program, _, wanted = rest.partition("@")
    if name not in PEERS or not program:
        raise ValueError(f"--peer is {text!r}. Use NAME=PROGRAM[@FORMAT] with a name of {', '.join(PEERS)}")
    kind = PEERS[name]
    if wanted and wanted not in kind.formats:
        raise ValueError(f"--peer {name} has no format {wanted!r}. Use one of {', '.join(kind.formats)}")
    # Not resolved: the Python of an environment is a link.
    return kind(Path(program).absolute(), wanted or kind.formats[0], job)


def turns(peers: Sequence[Peer], ours: Sequence[dict[str, Peer]]) -> Iterator[Peer]:
    """Yield who is measured, in order: for each way of measuring, us before and after every peer."""
    for how in dict.fromkeys(peer.how for peer in peers):
        for peer in (peer for peer in peers if peer.how == how):
            yield from (formats[how] for formats in ours)
            yield peer
        yield from (formats[how] for formats in ours)


def run(peers: Sequence[Peer], ours: Sequence[dict[str, Peer]], args: argparse.Namespace) -> dict[str, Any]:
    """Measure all; return the rounds, the ratios, and the reasons of those that were not measured."""
    rounds: list[Round] = []
    missing = {name: f"not named by --peer. To install: {kind.install}" for name, kind in PEERS.items()}
    for peer in peers:
        missing.pop(peer.name, None)
    for peer in turns(peers, ours):
        who = {"name": peer.name, "format": peer.format, "how": peer.how}
        try:
            rates = measure(peer, args)
        except NotMeasured as error:
            if peer.name == NAME:
                raise
            missing[str(peer)] = str(error)
            print(f"{peer}: not measured: {error}", file=sys.stderr)
            continue
        except KeyboardInterrupt:
            missing[str(peer)] = "interrupted, as is all after it"
            break
        rounds.append(who | rates)
        print(f"{peer}, {peer.how}: {shown(rates, 'burst')} and {shown(rates, 'stream')} tokens/s", file=sys.stderr)
    return {"rounds": rounds, "ratios": ratios(rounds), "not_measured": missing}


def ratios(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Return for each peer and each of our formats how many times as fast we were, next to it in the order."""
    result = []
    for i, peer in enumerate(rounds):
        if peer["name"] == NAME:
            continue
        ours = [r for r in rounds if r["name"] == NAME and r["how"] == peer["how"]]
        for format in dict.fromkeys(r["format"] for r in ours):
            before = [r for r in rounds[:i] if r in ours and r["format"] == format][-1:]
            after = [r for r in rounds[i:] if r in ours and r["format"] == format][:1]
            ratio = {load: statistics.median(x for r in before + after for x in r[load]) / statistics.median(peer[load])
                     for load in ("burst", "stream")}  # fmt: skip
            result.append({"ours": format, "peer": f"{peer['name']} {peer['format']}", "how": peer["how"], **ratio})
    return result


def shown(rates: Rates, load: str) -> str:
    """Return median and spread, such as 295 (290-301)."""
    low, middle, high = min(rates[load]), statistics.median(rates[load]), max(rates[load])
    return f"{middle:.0f} ({low:.0f}-{high:.0f})"


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield the rates and the ratios, in 80 columns."""
    heads, title = ("how", f"W{result['slots']}", "W1"), f"tokens/s, median (lowest-highest): {result['processor']}"
    rows = [(r["name"], r["format"], r["how"], shown(r, "burst"), shown(r, "stream")) for r in result["rounds"]]
    yield table_of(title, ("server", "format", *heads), rows, left=3, title_justify="left")
    rows = [(r["ours"], r["peer"], r["how"], f"{r['burst']:.2f}", f"{r['stream']:.2f}") for r in result["ratios"]]
    yield table_of("times as fast as the peer", ("ours", "peer", *heads), rows, left=3, title_justify="left")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.parser("peers", __doc__)
    parser.add_argument("--model", help="what we load, as the server's --model (default: the folder)")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"),
                        help="dummy: random weights of the model's shape, the same ones for all")  # fmt: skip
    parser.add_argument("--folder", type=Path,
                        help="the checkpoint as transformers stores it, for the peers (default: it is written)")  # fmt: skip
    parser.add_argument("--gguf", type=Path,
                        help="the same model in a GGUF file, for llama.cpp (default: the model, where it is one)")  # fmt: skip
    parser.add_argument("--formats", nargs="+", default=["bfloat16"], metavar="FORMAT",
                        help=f"ours, of {', '.join(formats.known())}, joined by +")  # fmt: skip
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PROGRAM[@FORMAT]",
                        help="; ".join(f"{name}: {', '.join(kind.formats)}" for name, kind in PEERS.items()))  # fmt: skip
    parser.add_argument("--work", type=Path, help="folder for converted models and logs (default: a temporary one)")
    parser.add_argument("--start-limit", type=float, default=900, metavar="SECONDS",
                        help="for a server to become ready; vLLM compiles for minutes at its first start (default: 900)")  # fmt: skip
    parser.add_argument("--slots", type=int, default=64, help="requests at once")
    parser.add_argument("--single", type=int, default=5, help="requests one after the other")
    parser.add_argument("--repeats", type=int, default=3, help="of each load, of which the median counts")
    parser.add_argument("--context", type=int, default=512, help="tokens that a slot of a peer holds")
    parser.add_argument("--threads", type=int, default=0, help="compute threads of all; 0: their own choice")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    if args.model is None and args.folder is None:
        parser.error("nothing to serve. Set --folder to a checkpoint, or --model to what we load")
    return args


def job_of(args: argparse.Namespace, work: Path) -> Job:
    """Return what all serve, after writing a checkpoint where none is named. ValueError where there is no model."""
    model, folder, gguf = str(args.model or args.folder), args.folder, args.gguf
    if folder is None:
        resolved = catalog.resolve(model, args.load_format)
        folder = checkpoint.write_folder(resolved, work / f"{resolved.name}-{args.load_format}")
        if args.load_format == "dummy":
            model = str(folder)  # the same random weights as the peers
        elif gguf is None and resolved.path is not None and resolved.path.is_file():
            gguf = resolved.path
    return Job(
        model=str(Path(model).absolute()) if Path(model).exists() else model, folder=folder.absolute(),
        gguf=gguf and gguf.absolute(), work=work, slots=args.slots, context=args.context, threads=args.threads,
    )  # fmt: skip


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        work = (args.work or Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        try:
            formats.check(args.formats)
            job = job_of(args, work)
            peers = [read_peer(text, job) for text in args.peer]
            result = run(peers, [programs(name, job) for name in args.formats], args)
        except (ValueError, NotMeasured) as error:  # also a model that cannot be loaded
            raise SystemExit(f"peers: {error}") from error
    result = {
        "model": args.model or args.folder.name, "processor": machine.describe()["processor"], "slots": args.slots,
        "single": args.single, "seed": args.seed, **result,
    }  # fmt: skip
    console = Console(stderr=True, width=80)
    for table in tables(result):
        console.print(table)
    for name, reason in result["not_measured"].items():
        console.print(f"not measured: {name}: {reason}", highlight=False, markup=False)
    report.finish("peers", result, args.json)


if __name__ == "__main__":
    main()

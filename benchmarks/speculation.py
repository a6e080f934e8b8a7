"""What drafts bring: one stream on texts that repeat themselves and on others, and many streams at once.

    python -m benchmarks.speculation --model smollm2 --json benchmarks/results/speculation.json

Each round serves the same requests without drafts and with `--speculate auto`. The speed of a shared machine changes from second
to second, so they take turns of 0.04 seconds, and chance decides who is first in a round. The figures are medians over the rounds,
and ratios of one round each. The texts must be equal. `--drafts 0 00 auto` has off twice, and their ratio shows the noise.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.engine import make_runner
from generate import machine
from generate.drafters.ngram import NgramDrafter
from generate.params import SamplingParams
from generate.runner import ModelRunner
from models.sources import catalog
from models.text.tokenizer import load_tokenizer
from policies import get_policy
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from scheduling.speculation import Speculator

CODE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def is_empty(self):
        return len(self.items) == 0
"""
FACTS = """The harbor of Port Ellen was built in 1831. In 1904 a storm destroyed the northern pier, and the town council decided
to replace it with a longer one of stone. The new pier was finished in 1909 and carried a small railway for coal. Since the
last mine closed in 1962, the railway has been used by visitors, who come to see the seals on the sandbank beyond it."""
REPEATING = {
    "code edit": f"Rename the class Stack to Pile in this code and return the whole code:\n\n{CODE}",
    "summary": f"Repeat the following text, then summarize it in one sentence:\n\n{FACTS}",
    "correction": f"Return this text with every mistake in spelling corrected:\n\n{FACTS}",
}
SLICE = 0.04  # seconds of a turn
FRESH = {
    "story": "Write a short story about a lighthouse keeper who finds a letter.",
    "advice": "How do I learn to play the violin as an adult?",
    "list": "Name ten animals that live in the sea and say one thing about each.",
}


def prompts_of(tokenizer: Any, texts: dict[str, str]) -> list[list[int]]:
    """Return the prompts as chats if the model has a chat template."""
    if tokenizer.chat_template is None:
        return [tokenizer.encode(text) for text in texts.values()]
    return [tokenizer.encode_chat([{"role": "user", "content": text}])[1] for text in texts.values()]


def requests(prompts: list[list[int]], args: argparse.Namespace, seed: int) -> list[Sequence]:
    """Return requests that end where the model ends them: behind its end it only repeats itself."""

    def stop(token: int) -> str | None:
        return "stop" if token in args.ends else None

    return [
        Sequence(
            prompt, args.tokens, id=str(i), stop=stop,
            sampling=SamplingParams(temperature=args.temperature, seed=seed + i),
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


class Server:
    """Serves requests without HTTP, with what it has learned in the rounds before. Several may share a runner and its pages."""

    def __init__(self, runner: ModelRunner, pool: PagePool, slots: int, drafts: str) -> None:
        fixed = None if drafts == "auto" else int(drafts)
        speculator = None if fixed == 0 else Speculator(NgramDrafter(), fixed, time.perf_counter)
        self.runner = runner
        self.scheduler = Scheduler(get_policy("dynamic", max_batch_size=slots), pool, 256, speculator=speculator)

    def begin(self, sequences: list[Sequence], at_once: int) -> None:
        """Take requests, of which so many are served at once."""
        self.sequences, self.waiting, self.at_once = sequences, [*sequences], at_once
        self.spent = self.decoding = 0.0
        self.tokens = 0

    @property
    def is_done(self) -> bool:
        return not self.waiting and self.scheduler.is_idle

    @property
    def rate(self) -> float:
        """Tokens per second of the steps in which all requests decode."""
        return self.tokens / self.decoding

    def serve(self, seconds: float) -> None:
        """Serve for about so long, or until all is done."""
        end = self.spent + seconds
        while self.spent < end and not self.is_done:
            while self.waiting and len(self.scheduler.running) + len(self.scheduler.waiting) < self.at_once:
                self.scheduler.add(self.waiting.pop(0))
            before = sum(len(seq.output_ids) for seq in self.sequences)
            began = time.perf_counter()
            iteration = self.scheduler.step(self.runner.forward, time.perf_counter)
            took = time.perf_counter() - began
            self.spent += took
            assert iteration is not None
            if all(member.phase == "decode" for member in iteration.members):
                self.decoding += took
                self.tokens += sum(len(seq.output_ids) for seq in self.sequences) - before


def pool_of(runner: ModelRunner) -> PagePool:
    return PagePool(runner.keys.shape[1], runner.page_size, prefix_cache=False)


def compare(
    runner: ModelRunner, prompts: list[list[int]], at_once: int, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Serve the same requests with each number of drafts; return the figures by number."""
    pool = pool_of(runner)
    servers = {drafts: Server(runner, pool, max(at_once, 1), drafts) for drafts in args.drafts}
    rates: dict[str, list[float]] = {drafts: [] for drafts in servers}
    drafted, accepted, steps = (dict.fromkeys(servers, 0) for _ in range(3))
    for number in range(args.rounds + 1):  # the first one warms up
        for server in servers.values():
            server.begin(requests(prompts, args, 1000 * number), at_once)
        order = sorted(servers.values(), key=lambda server: random.random())
        while waiting := [server for server in order if not server.is_done]:
            min(waiting, key=lambda server: server.spent).serve(SLICE)
        texts = [[seq.output_ids for seq in server.sequences] for server in servers.values()]
        assert all(text == texts[0] for text in texts), "drafts changed a text"
        for drafts, server in servers.items() if number else ():
            rates[drafts].append(server.rate)
            drafted[drafts] += sum(seq.drafted for seq in server.sequences)
            accepted[drafts] += sum(seq.accepted for seq in server.sequences)
            steps[drafts] += sum(len(seq.output_ids) - seq.accepted for seq in server.sequences)
    base = rates[args.drafts[0]]
    return {
        drafts: {
            "tokens_per_s": statistics.median(rates[drafts]),
            "ratio": statistics.median(rate / own for rate, own in zip(rates[drafts], base)),
            "drafts_per_token": drafted[drafts] / max(1, steps[drafts]),
            "acceptance": accepted[drafts] / drafted[drafts] if drafted[drafts] else 0.0,
            "tokens_per_step": 1 + accepted[drafts] / max(1, steps[drafts]),
        }
        for drafts in servers
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    machine.use_threads(args.threads)
    tokenizer = load_tokenizer(catalog.resolve(args.model, args.load_format), None)
    args.ends = frozenset(tokenizer.eos_ids)
    repeating, fresh = prompts_of(tokenizer, REPEATING), prompts_of(tokenizer, FRESH)
    longest = max(map(len, repeating)) + args.tokens + machine.PAGE_SIZE
    runner, name = make_runner(args, len(args.drafts) * (max(args.batch, default=1) + 1) * longest)
    both = repeating + fresh
    wanted = [("one stream, repeating", repeating, 1), ("one stream, nothing to look up", fresh, 1)]
    for batch in args.batch:
        for kind, some in (("both kinds", both), ("nothing to look up", fresh)):
            prompts = [some[i % len(some)] for i in range(max(batch, min(2 * batch, 12)))]
            wanted.append((f"{batch} at once, {kind}", prompts, batch))
    cases = {}
    for case, prompts, at_once in wanted:
        cases[case] = compare(runner, prompts, at_once, args)
        ratios = ", ".join(f"{drafts}: {figures['ratio']:.2f}" for drafts, figures in cases[case].items())
        print(f"{case}: {ratios}", file=sys.stderr, flush=True)  # in case the time is cut
    return {"model": name, "temperature": args.temperature, "tokens": args.tokens, "cases": cases}


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['model']}, temperature {result['temperature']:g}")
    for column in ("case", "drafts", "tokens/s", "of none", "tokens a step", "accepted"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case, figures in result["cases"].items():
        for drafts, f in figures.items():
            table.add_row(
                case, drafts, f"{f['tokens_per_s']:.1f}", f"{f['ratio']:.2f}", f"{f['tokens_per_step']:.2f}",
                f"{f['acceptance']:.0%}",
            )  # fmt: skip
    Console(stderr=True).print(table)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the throughput with drafts as a share of that without, over the number of requests at once."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.4))
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for case, by_drafts in result["cases"].items():
        batch, comma, kind = case.partition(" at once, ")
        for drafts, figures in [*by_drafts.items()][1:] if comma else []:
            lines.setdefault((drafts, kind), []).append((int(batch), figures["ratio"]))
    for (drafts, kind), points in lines.items():
        axes.plot(*zip(*points), marker="o", label=f"{drafts if drafts.strip('0') else 'off again'}, {kind}")
    axes.axhline(1, color="#777777", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens/s, of those without drafts")
    axes.set_title(f"{result['model']}: speculative decoding", fontsize=10)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    parser = report.parser("speculation", __doc__)
    report.add_model(parser)
    parser.set_defaults(model="smollm2")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--drafts", nargs="+", default=["0", "auto"], help="the first is what others are compared with")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--picture", type=Path, help="draw the throughput over the number of requests at once")
    args = parser.parse_args()
    result = run(args)
    show(result)
    if args.picture:
        draw(result, args.picture)
    report.finish("speculation", result, args.json)


if __name__ == "__main__":
    main()

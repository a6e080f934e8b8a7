"""Tokens per second of a full batch whose requests have LoRA adapters: none, one for all, and more.

    quietly .venv/bin/python -m benchmarks.adapters
    quietly .venv/bin/python -m benchmarks.adapters --model bard --adapters 0,8

A batch of `--slots` requests decodes `--steps` steps after their prompts, once for each number of adapters in turn, for
`--rounds` rounds, so that what else the machine does meets all of them. Adapters have random numbers and change all linear
layers. The figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from benchmarks.machine import describe
from generate import machine
from generate.cpu.adapters import PreparedAdapter
from generate.cpu.prepare import prepare
from generate.params import GREEDY
from generate.runner import ModelRunner
from models import catalog, tensors, weights
from models.adapters import Adapter, LowRank
from models.architecture import Architecture
from models.families import family_of
from scheduling.iteration import Plan
from scheduling.sequence import Sequence


def random_adapter(resolved: catalog.ResolvedModel, rank: int, seed: int) -> Adapter:
    """Return an adapter of random numbers at all linear layers of the blocks."""
    generator = torch.Generator().manual_seed(seed)
    config = resolved.architecture
    products = []
    for piece in tensors.pieces(config, family_of(resolved.config).layout).values():
        if piece.place.layer is None or len(piece.shape) != 2:
            continue
        out, into = piece.shape[::-1] if piece.transposed else piece.shape
        a = torch.randn(rank, into, generator=generator) / into**0.5
        b = torch.randn(out, rank, generator=generator) * 0.01
        products.append(LowRank(piece.place.layer, piece.place.part, piece.start, a, b))
    return Adapter(products, rank, str(seed))


class Batch:
    """A full batch of requests of which each has the next of `adapters`."""

    def __init__(
        self, runner: ModelRunner, slots: int, prompt: int, pages: int, adapters: list[PreparedAdapter | None]
    ) -> None:
        self.runner = runner
        self.sequences = [
            Sequence([(7 * i + j) % 1000 for j in range(prompt)], runner.config.block_size - prompt, sampling=GREEDY,
                     pages=[*range(1 + i * pages, 1 + (i + 1) * pages)], adapter_weights=adapters[i % len(adapters)])
            for i in range(slots)
        ]  # fmt: skip
        self.number = 0
        self.step()

    def step(self) -> None:
        """Compute one token of each request."""
        self.number += 1
        counts = [seq.pending for seq in self.sequences]
        plan = Plan(self.number, 0.0, self.sequences, counts, repeats=self.number > 2)
        for seq, token in zip(self.sequences, self.runner.forward(plan)):
            assert isinstance(token, int)
            seq.computed = seq.length
            seq.output_ids.append(token)

    def rate(self, steps: int) -> float:
        """Return the tokens per second of so many steps."""
        self.step()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        return steps * len(self.sequences) / (time.perf_counter() - began)


def measure(args: argparse.Namespace, counts: list[int]) -> tuple[dict[int, list[float]], int]:
    """Return the rates of each number of adapters by round, and the bytes of one adapter."""
    resolved = catalog.resolve(args.model, "auto" if args.model == "bard" else "dummy")
    dtype = getattr(torch, args.dtype)
    machine.use_threads(args.threads)
    prepare(dtype, args.quantize)
    config: Architecture = resolved.architecture
    pages = -(-(args.prompt + args.steps + 3) // machine.PAGE_SIZE)  # of each request
    runner = ModelRunner(
        weights.load(resolved, dtype), args.slots * pages + 1, machine.PAGE_SIZE, quantize=args.quantize
    )
    prepared = [PreparedAdapter(random_adapter(resolved, args.rank, i), config, dtype) for i in range(max(counts))]
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(args.rounds):
        for count in counts:
            batch = Batch(runner, args.slots, args.prompt, pages, [*prepared[:count]] or [None])
            rates[count].append(batch.rate(args.steps))
    return rates, prepared[0].nbytes if prepared else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-medium", help="its shape with random weights, or bard")
    parser.add_argument("--adapters", default="0,1,8,32,64", help="numbers of adapters, separated by commas")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--quantize", default="none", choices=["none", "int8", "int4"])
    return parser.parse_args()


def main() -> None:
    args = arguments()
    counts = [int(count) for count in args.adapters.split(",")]
    rates, size = measure(args, counts)
    print(
        f"{args.model}, {args.dtype}, quantize {args.quantize}, rank {args.rank}, {args.slots} requests; {describe()}"
    )
    print(f"an adapter has {size / 2**20:.1f} MiB")
    base = statistics.median(rates[counts[0]])
    for count, found in rates.items():
        median = statistics.median(found)
        print(
            f"{count:3} adapters: {median:7.1f} tokens/s ({min(found):.1f} to {max(found):.1f}), {median / base:.2f} of the first"
        )


if __name__ == "__main__":
    main()

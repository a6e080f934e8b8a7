"""Tokens per second of a full batch whose requests have LoRA adapters: none, one for all, and more.

    quietly .venv/bin/python -m benchmarks.adapters
    quietly .venv/bin/python -m benchmarks.adapters --model bard --adapters 0,8

A batch of `--slots` requests decodes `--steps` steps after their prompts, once for each number of adapters in turn, for
`--rounds` rounds, so that what else the machine does meets all of them. Adapters have random numbers and change all linear
layers. The figure is the median over the rounds.

`--load` measures something else: the longest step of a full batch while an adapter is read from a folder and prepared in
another thread, as the server does, beside the median of steps without that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.machine import describe
from generate import machine
from generate.cpu.adapters import PreparedAdapter
from generate.cpu.prepare import prepare
from generate.params import GREEDY
from generate.runner import ModelRunner
from models import adapters, tensors, weights
from models.adapters import Adapter, LowRank
from models.families import family_of
from models.sources import catalog
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
    """A full batch of requests of which each has the next of `chosen`."""

    def __init__(
        self, runner: ModelRunner, slots: int, prompt: int, pages: int, chosen: list[PreparedAdapter | None]
    ) -> None:
        self.runner = runner
        self.sequences = [
            Sequence([(7 * i + j) % 1000 for j in range(prompt)], runner.config.block_size - prompt, sampling=GREEDY,
                     pages=[*range(1 + i * pages, 1 + (i + 1) * pages)], adapter_weights=chosen[i % len(chosen)])
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

    def seconds(self) -> float:
        """Return the seconds of a step."""
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began

    def rate(self, steps: int) -> float:
        """Return the tokens per second of so many steps."""
        self.step()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        return steps * len(self.sequences) / (time.perf_counter() - began)


def set_up(args: argparse.Namespace, steps: int) -> tuple[catalog.ResolvedModel, ModelRunner, int]:
    """Return the model, a runner with room for so many steps, and the number of pages of each request."""
    resolved = catalog.resolve(args.model, "auto" if args.model == "bard" else "dummy")
    dtype = getattr(torch, args.dtype)
    machine.use_threads(args.threads)
    prepare(dtype, args.quantize)
    pages = -(-(args.prompt + steps + 4) // machine.PAGE_SIZE)
    n_pages = args.slots * pages + 1
    runner = ModelRunner(weights.load(resolved, dtype), n_pages, machine.PAGE_SIZE, quantize=args.quantize)
    return resolved, runner, pages


def measure(args: argparse.Namespace, counts: list[int]) -> tuple[dict[int, list[float]], int]:
    """Return the rates of each number of adapters by round, and the bytes of one adapter."""
    resolved, runner, pages = set_up(args, args.steps)
    config, dtype = resolved.architecture, runner.dtype
    prepared = [PreparedAdapter(random_adapter(resolved, args.rank, i), config, dtype) for i in range(max(counts))]
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(args.rounds):
        for count in counts:
            batch = Batch(runner, args.slots, args.prompt, pages, [*prepared[:count]] or [None])
            rates[count].append(batch.rate(args.steps))
    return rates, prepared[0].nbytes if prepared else 0


def write_adapter(folder: Path, resolved: catalog.ResolvedModel, rank: int) -> None:
    """Write an adapter of random numbers at all linear layers, in PEFT's format."""
    stored = {}
    for name, piece in tensors.pieces(resolved.architecture, family_of(resolved.config).layout).items():
        if piece.place.layer is not None and len(piece.shape) == 2:
            out, into = piece.shape[::-1] if piece.transposed else piece.shape
            module = f"{adapters.PREFIX}{name.removesuffix('.weight')}"
            stored[f"{module}.lora_A.weight"] = torch.randn(rank, into)
            stored[f"{module}.lora_B.weight"] = torch.randn(out, rank)
    save_file(stored, folder / adapters.WEIGHTS)
    (folder / adapters.CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def measure_load(args: argparse.Namespace) -> None:
    """Print the longest step while an adapter is loaded, `--rounds` times, and the median of the steps without."""
    resolved, runner, pages = set_up(args, steps=(args.rounds + 1) * args.steps)
    batch = Batch(runner, args.slots, args.prompt, pages, [None])
    batch.step()
    layout = family_of(resolved.config).layout
    quiet = [batch.seconds() for _ in range(args.steps)]
    longest: list[float] = []
    took: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        write_adapter(Path(name), resolved, args.rank)

        def load() -> None:
            began = time.perf_counter()
            adapter = adapters.load(Path(name), resolved.architecture, layout)
            PreparedAdapter(adapter, resolved.architecture, runner.dtype)
            took.append(time.perf_counter() - began)

        for _ in range(args.rounds):
            thread = threading.Thread(target=load)
            thread.start()
            longest.append(max(batch.seconds() for _ in range(args.steps)))
            thread.join()
    median = statistics.median(quiet)
    print(f"{args.model}, {args.dtype}, rank {args.rank}, {args.slots} requests; {describe()}")
    print(f"a step takes {median * 1000:.1f} ms (up to {max(quiet) * 1000:.1f})")
    print(f"loads took {', '.join(f'{seconds * 1000:.0f}' for seconds in took)} ms")
    print(f"the longest step meanwhile took {max(longest) / median:.2f} times as long as the median without")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-medium", help="its shape with random weights, or bard")
    parser.add_argument("--adapters", default="0,1,8,32,64", help="numbers of adapters, separated by commas")
    parser.add_argument("--load", action="store_true", help="measure steps while an adapter is loaded")
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
    if args.load:
        measure_load(args)
        return
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

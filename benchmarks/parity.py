"""Whether the greedy text of a request is the same alone and in a full batch, token by token.

    python -m benchmarks.parity --load-format dummy --dtype bfloat16 --json benchmarks/results/parity.json

Random weights are the hard case: the two likeliest tokens are often close, so a change in the last bits of the logits
shows. The exit code is 1 if a text differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

from rich.console import Console

from benchmarks import offline, report
from benchmarks.engine import make_runner
from generate import machine
from generate.params import GREEDY
from generate.runner import ModelRunner
from scheduling.sequence import Sequence


def texts(runner: ModelRunner, policy: str, slots: int, args: argparse.Namespace) -> list[list[int]]:
    """Return the tokens of all prompts under `policy` with `slots` slots."""
    rng = random.Random(args.seed)
    vocab = runner.config.vocab_size
    sequences = [
        Sequence([rng.randrange(vocab) for _ in range(rng.randrange(4, 80))], args.tokens, id=str(i), sampling=GREEDY)
        for i in range(args.prompts)
    ]
    offline.serve(runner, sequences, policy, slots, tokens_per_step=256)
    return [seq.output_ids for seq in sequences]


def run(args: argparse.Namespace) -> dict[str, Any]:
    machine.use_threads(args.threads)
    runner, name = make_runner(args, args.slots * (80 + args.tokens + 128))
    alone = texts(runner, "nobatch", 1, args)
    batch = texts(runner, "dynamic", args.slots, args)
    return {
        "benchmark": "parity", "model": name, "load_format": args.load_format,
        "dtype": str(runner.dtype).removeprefix("torch."), "prompts": args.prompts, "tokens": args.tokens,
        "slots": args.slots, "equal": sum(a == b for a, b in zip(alone, batch)),
        "different_texts": len({tuple(tokens) for tokens in alone}),
        "command": "python -m benchmarks.parity " + " ".join(sys.argv[1:]),
    }  # fmt: skip


def main() -> None:
    parser = report.parser("parity", __doc__)
    report.add_model(parser)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    result = run(args)
    Console(stderr=True).print(
        f"{result['model']} {result['dtype']}: {result['equal']} of {result['prompts']} texts are the same alone "
        f"and among {result['slots']} ({result['different_texts']} different texts)"
    )
    report.finish("parity", result, args.json)
    raise SystemExit(result["equal"] != result["prompts"])


if __name__ == "__main__":
    main()

"""Time single steps of the engine for `./eb simulate calibrate`: points on stdin, seconds on stdout.

The first line of the output describes the model and the machine; then comes a line {"seconds": ...} for each point as
soon as it is timed. For a model that cannot be loaded the only line is {"error": ...}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dev.benchmarks import report
from models.sources import catalog
from scheduling.iteration import Plan
from scheduling.sequence import Sequence

if TYPE_CHECKING:  # importing torch takes seconds, and an unknown model is told without it
    from generate.grammar import Grammar
    from generate.runner import ModelRunner

SPARE_TOKENS = 1024  # of KV, because sequences begin on pages of their own
SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 100}  # no answer ends while it is timed
MOST_TOKENS = 48  # of a constrained answer, for which its pages have room


def plan_of(runner: ModelRunner, point: dict[str, int], grammar: Grammar) -> Plan:
    """Return the step of a point: decodes, the first of them constrained, and chunks of prompts after cached tokens."""
    from dev.benchmarks.offline import decoding
    from generate.constraint import Constraint

    decodes = decoding(runner, point["decodes"], max(1, point["context"]), 0.0)
    for seq in decodes[: point["masks"]]:
        seq.constrained, seq.sampling = True, replace(seq.sampling, grammar=Constraint(grammar))
        seq.prompt_ids, seq.output_ids = seq.prompt_ids + seq.output_ids, []
    length = point["cached"] + point["chunk"]
    prompts = decoding(runner, point["prefills"], length, 0.0) if point["prefills"] else []
    first = 1 + max((page for seq in decodes for page in seq.pages), default=0)
    for seq in prompts:
        seq.output_ids, seq.computed = [], point["cached"]
        seq.pages = [page + first - 1 for page in seq.pages]
    counts = [1] * len(decodes) + [point["chunk"]] * len(prompts)
    return Plan(1, 0.0, [*decodes, *prompts], counts)


def seconds_of(runner: ModelRunner, plan: Plan, steps: int) -> float:
    """Return the median of `steps` runs of a plan, each the same work.

    Only constrained sequences advance, since a mask may be known where it was computed before, and begin again at the end.
    """
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        outputs = runner.forward(plan)
        times.append(time.perf_counter() - start)
        for seq, output in zip(plan.sequences, outputs):
            if seq.constrained:
                assert isinstance(output, int), output
                seq.output_ids = [*seq.output_ids, output] if len(seq.output_ids) < MOST_TOKENS else []
                seq.computed = seq.length - 1
    return statistics.median(times)


def tokens_of(point: dict[str, int]) -> int:
    """Return the number of tokens that need keys and values."""
    return (point["decodes"] * (point["context"] + 80)) + point["prefills"] * (point["cached"] + point["chunk"] + 80)


def check_context(runner: ModelRunner, name: str, context: int) -> None:
    """Raise ValueError if the model holds fewer tokens than are to be timed."""
    if context > runner.config.block_size:
        most = runner.config.block_size
        raise ValueError(
            f"{name} holds {most:,} tokens, which is less than the {context:,} of the longest sequence to time. Use "
            f"'./eb simulate calibrate --model {name} --context {most}'"
        )


def sizes(runner: ModelRunner) -> dict[str, float]:
    """Return what a model without weights needs to stand for this one: context, token ids, bytes of KV per token.

    chosen: of a mixture only, the share of its experts that a token needs.
    """
    from generate import machine

    shape = runner.config
    per_token = machine.bytes_per_token(shape, runner.keys.dtype)
    chosen = {"chosen": shape.experts_chosen / shape.experts} if shape.experts else {}
    return {"context": shape.block_size, "vocabulary": shape.vocab_size, "kv_bytes": per_token, **chosen}


def load(args: argparse.Namespace, tokens: int) -> tuple[ModelRunner, str, Grammar]:
    """Load the model with room for `tokens` tokens of KV; return it with its name and the grammar of constrained answers."""
    resolved = catalog.resolve(args.model, args.load_format)
    from dev.benchmarks.engine import make_runner
    from generate import machine
    from generate.grammar import Grammars
    from models.text.tokenizer import load_tokenizer

    machine.use_threads(args.threads)
    runner, name = make_runner(args, tokens)
    check_context(runner, name, args.context)
    return runner, name, Grammars(load_tokenizer(resolved), runner.config.vocab_size).compile("json", SCHEMA)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dev.benchmarks.probe", description=__doc__)
    report.add_model(parser)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--context", type=int, default=0, help="tokens that the model must hold")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    points: list[dict[str, int]] = json.load(sys.stdin)
    try:
        runner, name, grammar = load(args, max(map(tokens_of, points)) + SPARE_TOKENS)
    except ValueError as error:  # from --model, its files or --dtype; the message names the remedy
        print(json.dumps({"error": str(error)}), flush=True)
        return
    from dev.benchmarks import machine as measured
    from dev.benchmarks.offline import decoding

    facts = {
        "model": name,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "quantize": args.quantize,
        "kv_dtype": str(runner.keys.dtype).removeprefix("torch."),
        **sizes(runner),
        **measured.describe(),
    }
    print(json.dumps(facts), flush=True)
    warm = Sequence([1] * 8, 1)
    warm.pages, warm.sampling = [1], decoding(runner, 1, 8, 0.0)[0].sampling
    seconds_of(runner, Plan(1, 0.0, [warm], [8]), 3)
    for point in points:
        plan = plan_of(runner, point, grammar)
        print(json.dumps({"seconds": seconds_of(runner, plan, args.steps)}), flush=True)


if __name__ == "__main__":
    main()

"""What number formats cost in quality, beside their speed: judged by the engine that serves them.

    python -m dev.benchmarks.quality --model smollm2 --formats bfloat16 int8 int4 int8-kv --bounds

For each format: bits per byte of a text that the model was not trained on; how far 100 greedy texts of 32 tokens are
those of the first format; and the linear layer with the largest relative error against float32, on real inputs.
Formats are joined by "+": int8+int8-kv. The change is against bfloat16 where it is among the formats, otherwise against
the first one.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from api.service import LoadedEngine
from dev.benchmarks import report
from dev.benchmarks.quality import figures, formats, layers, text
from generate.runner import ModelRunner
from terminal.console import table_of


def judge(args: argparse.Namespace, judged: text.Judged) -> list[dict[str, Any]]:
    """Return the figures of each format."""
    exact = exact_layers(args, judged.text)
    results = []
    expected: list[list[int]] = []
    for name in args.formats:
        engine = formats.load(name, args.model, args.load_format, args.device, args.threads)
        runner, ids = formats.runner_of(engine), engine.tokenizer.encode(judged.text)
        first = list(engine.tokenizer.bos_ids)
        window = min(args.window, engine.context - 1 - len(first))
        stride = min(args.stride, window)
        bits = figures.bits_per_byte(runner, ids, first, len(judged.text.encode()), window, stride)
        prompts = [[*first, *prompt] for prompt in text.prompts(ids, args.prompts, args.seed)]
        texts = figures.greedy_texts(runner, prompts, args.tokens, slots=64)
        expected = expected or texts
        agreed = figures.agreement(texts, expected)
        result = {"format": name, "dtype": engine.dtype, "bits_per_byte": bits, "equal_tokens": agreed.tokens,
                  "equal_texts": agreed.texts, "tokens": len(ids), "window": window, "stride": stride}  # fmt: skip
        if exact and isinstance(runner, ModelRunner):
            worst = layers.worst(runner, exact)
            result |= {"worst_layer": worst.name, "worst_error": worst.error}
        results.append(result)
        print(f"{name}: {bits:.4f} bits per byte", file=sys.stderr)
        del engine, runner
        gc.collect()  # an engine is part of reference cycles, and the next one needs its memory
    return results


def exact_layers(args: argparse.Namespace, content: str) -> dict[str, layers.Exact]:
    """Return what each linear layer gets and gives in float32; nothing on a GPU, whose layers are others."""
    engine: LoadedEngine = formats.load("float32", args.model, args.load_format, args.device, args.threads)
    runner = formats.runner_of(engine)
    if not isinstance(runner, ModelRunner):
        return {}
    ids = [*engine.tokenizer.bos_ids, *engine.tokenizer.encode(content)]
    return layers.record(runner, ids[: args.layer_tokens])


def compare(results: list[dict[str, Any]]) -> None:
    """Add to each result its change against the baseline, its bound, and whether it keeps it."""
    baseline = next((r for r in results if r["format"] == "bfloat16"), results[0])
    for result in results:
        change = result["bits_per_byte"] / baseline["bits_per_byte"] - 1
        bound = formats.bound(result["format"])
        result |= {"against": baseline["format"], "change": change, "bound": bound}
        result["within"] = change == change and (bound is None or change <= bound)


def table(results: list[dict[str, Any]], title: str) -> Table:
    """Return the results in 80 columns."""
    rows = []
    for r in results:
        bound = "" if r["bound"] is None else f"{r['bound']:.1%}" + ("" if r["within"] else " !")
        layer = f"{r['worst_error']:.2%} {r['worst_layer']}" if "worst_layer" in r else ""
        change = "" if r["format"] == r["against"] else f"{r['change']:+.2%}"
        tokens, texts = f"{r['equal_tokens']:.1%}", str(r["equal_texts"])
        rows.append((r["format"], f"{r['bits_per_byte']:.4f}", change, bound, tokens, texts, layer))
    heads = ("format", "bits/byte", "change", "bound", "tokens", "texts", "worst layer")
    return table_of(title, heads, rows, 1, heads[-1:], title_justify="left", box=box.SIMPLE, pad_edge=False)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all formats. FormatError names one that is not known or cannot run."""
    formats.check(args.formats)
    judged = text.read(args.model, args.text)
    judged = judged._replace(text=judged.text[: args.chars or None])
    results = judge(args, judged)
    compare(results)
    return {
        "model": args.model, "load_format": args.load_format, "text": judged.name, "bytes": len(judged.text.encode()),
        "prompts": args.prompts, "tokens": args.tokens, "seed": args.seed, "formats": results,
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    console = Console(stderr=True, width=80)
    first = result["formats"][0]
    console.print(table(result["formats"], f"{result['model']}: {result['bytes']:,} bytes of {result['text']}"))
    console.print(
        f"change: bits per byte against {first['against']}. tokens: the share of {result['prompts']} greedy texts of "
        f"{result['tokens']} tokens before the first difference from {first['format']}'s; texts: those that are equal. "
        "worst layer: the largest relative error against float32, with block and part. !: beyond its bound.",
        highlight=False,
    )


def arguments() -> argparse.Namespace:
    parser = report.parser("quality", __doc__)
    parser.add_argument("--model", default="bard")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--device", default="cpu", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--formats", nargs="+", default=["float32", "bfloat16"], metavar="FORMAT",
                        help=f"of {', '.join(formats.known())}; the first is what texts are compared with")  # fmt: skip
    parser.add_argument("--text", type=Path, help="judge by this file (default: bard's held-out plays for bard, "
                        "Python's own reference for other models)")  # fmt: skip
    parser.add_argument("--chars", type=int, default=0, help="judge by at most so many characters; 0: all")
    parser.add_argument("--window", type=int, default=1024, help="most tokens before a token that is predicted")
    parser.add_argument("--stride", type=int, default=512, help="tokens by which the window moves")
    parser.add_argument("--prompts", type=int, default=100, help="greedy texts")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a greedy text")
    parser.add_argument("--layer-tokens", type=int, default=128, help="inputs of each layer for the worst error")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0: one per core")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--bounds", action="store_true", help="exit with 1 where a format is beyond its bound: "
                        + ", ".join(f"{name} {share:.1%}" for name, share in formats.BOUNDS.items()).replace("%", "%%"))  # fmt: skip
    return parser.parse_args()


def main() -> None:
    args = arguments()
    try:
        result = run(args)
    except (formats.FormatError, *formats.MODEL_ERRORS) as error:
        raise SystemExit(f"quality: {error}") from error
    show(result)
    report.finish("quality", result, args.json)
    raise SystemExit(args.bounds and not all(r["within"] for r in result["formats"]))


if __name__ == "__main__":
    main()

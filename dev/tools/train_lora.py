"""Train two small LoRA adapters for `bard`, comedies and tragedies, on the text that bard was made from.

    python dev/tools/train_lora.py --text FILE [--out weights] [--steps 100] [--rank 8]

Each adapter learns plays of its kind but for a part at their end, on which it and the model alone are then compared, in
bits per byte. The last fortieth of the text, comedies, is new to both. All tragedies of the text are in what bard was
trained on, so there only the adapter is tested on new text, and its gain is a lower bound.

The weights W of the model stay as they are; a layer computes W x + s B A x. The files are in PEFT's format, in float16.

Needs `tokenizers`, a development dependency; the server does not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import date
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from dev.tools.train_bard import Progress, backward, batches, bits_per_byte, encode, write_sample
from models import weights
from models.gpt2 import GPT
from models.sources import catalog

MODULES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
# Characters of tiny shakespeare, by thousandths: plays to learn, and what is held out of them.
KINDS = {
    "comedies": {
        "plays": "The Winter's Tale, Measure for Measure, The Taming of the Shrew and The Tempest",
        "learn": [(637, 975)], "held": [(975, 1000)],
        "note": "neither the model nor the adapter has seen it; three quarters of `weights/bard/held_out.txt` are among what "
        "the adapter learned, so that file does not test it",
    },
    "tragedies": {
        "plays": "Coriolanus, Richard III, Richard II, and Romeo and Juliet",
        "learn": [(0, 133), (139, 278), (284, 396), (402, 504)], "held": [(133, 139), (278, 284), (396, 402), (504, 510)],
        "note": "the adapter has not seen it, but the model has, so the gain is a lower bound",
    },
}  # fmt: skip


class Adapted(torch.nn.Module):
    """A linear layer with low-rank factors A and B; B begins with zeros, so that nothing is changed at first."""

    def __init__(self, layer: torch.nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer.requires_grad_(False), scale
        self.a = torch.nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.b = torch.nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + s B A x for x (..., in)."""
        y: Tensor = self.layer(x) + self.scale * (x @ self.a.T) @ self.b.T
        return y


def adapt(model: GPT, rank: int, scale: float) -> dict[str, Adapted]:
    """Put factors into the linear layers of all blocks; return them by the layers' names in PEFT's files."""
    found = {name: Adapted(layer, rank, scale) for name, layer in model.named_modules() if name.endswith(MODULES)}
    for name, adapted in found.items():
        model.set_submodule(name, adapted)
    return found


def train(model: GPT, factors: dict[str, Adapted], tokenizer: Tokenizer, text: str, args: argparse.Namespace) -> None:
    """Train the factors; the other weights stay."""
    optimizer = torch.optim.AdamW(
        [p for f in factors.values() for p in (f.a, f.b)], lr=args.lr, weight_decay=args.weight_decay
    )
    progress = Progress(args.steps, None)
    for x, y, position in batches(tokenizer, text, args, progress):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min((progress.step + 1) / 20, 1.0, 1.5 * (1 - progress.share))
        loss = backward(model.train(), x, y, position)
        optimizer.step()
        optimizer.zero_grad()
        if progress.step % 20 == 19:
            print(f"step {progress.step + 1}, loss {loss:.3f}, {progress.seconds:.0f} s", file=sys.stderr)


def save(factors: dict[str, Adapted], rank: int, alpha: int, out: Path) -> None:
    """Write the adapter as PEFT does."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, one in factors.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = one.a.detach().half().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = one.b.detach().half().contiguous()
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "bard", "r": rank, "lora_alpha": alpha,
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": True, "inference_mode": True,
        "target_modules": ["c_attn", "c_fc", "c_proj"],
    }  # fmt: skip
    (out / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")


def parts_of(text: str, ranges: list[tuple[int, int]]) -> str:
    """Return these thousandths of the text, one after the other."""
    return "".join(text[len(text) * low // 1000 : len(text) * high // 1000] for low, high in ranges)


def card(kind: str, held: str, facts: dict[str, float], args: argparse.Namespace, sample: str) -> str:
    return f"""# bard-{kind}

A LoRA adapter for bard, the built-in model, in PEFT's format: `--model bard --adapter {kind}=weights/bard-{kind}`.

| | |
|---|---|
| changes | {", ".join(MODULES)} of all blocks, rank {args.rank}, alpha {args.alpha} |
| parameters | {int(facts["parameters"]):,}, float16 |
| data | bard's text: {KINDS[kind]["plays"]} ("tiny shakespeare", public domain), {int(facts["learned"]):,} characters |
| held out | {len(held.encode()):,} bytes of these plays; {KINDS[kind]["note"]} |
| loss on the held-out text | **{facts["with"]:.4f} bits per byte**, {facts["without"]:.4f} without the adapter: {1 - facts["with"] / facts["without"]:.2%} less; context 1,024, window moved by 512 |
| steps | {args.steps} of {args.tokens_per_step:,} tokens by AdamW, rate {args.lr:g}, weight decay {args.weight_decay:g}, dropout {args.dropout:g} in the network |
| made | {date.today().isoformat()}, cpu, {torch.get_num_threads()} threads, torch {torch.__version__}, {facts["minutes"]:.1f} minutes |
| command | `python dev/tools/train_lora.py --text shakespeare.txt --steps {args.steps} --rank {args.rank} --lr {args.lr:g} --seed {args.seed}` |
| license | that of the project, as bard |

At temperature 0.8, from "ROMEO:":

```
{sample}
```
"""


def make(kind: str, text: str, args: argparse.Namespace) -> dict[str, float]:
    """Train one adapter, write its folder, and return its losses with and without."""
    began = time.perf_counter()
    torch.manual_seed(args.seed)
    model = weights.load_gpt(catalog.resolve("bard"))
    model.eval()
    tokenizer = Tokenizer.from_file(str(catalog.BARD / "tokenizer.json"))
    learn, held = (parts_of(text, KINDS[kind][part]) for part in ("learn", "held"))  # type: ignore[arg-type]
    ids, size = encode(tokenizer, held), len(held.encode())
    without = bits_per_byte(model, ids, size, 512)
    factors = adapt(model, args.rank, args.alpha / args.rank)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = args.dropout
    train(model, factors, tokenizer, learn, args)
    for one in factors.values():  # evaluate the numbers as they are stored
        one.a.data, one.b.data = one.a.data.half().float(), one.b.data.half().float()
    model.eval()
    facts = {
        "with": bits_per_byte(model, ids, size, 512), "without": without, "learned": len(learn),
        "parameters": sum(one.a.numel() + one.b.numel() for one in factors.values()),
    }  # fmt: skip
    facts["minutes"] = (time.perf_counter() - began) / 60
    out = args.out / f"bard-{kind}"
    save(factors, args.rank, args.alpha, out)
    sample = write_sample(model, tokenizer, "ROMEO:", 120, args.seed)
    (out / "README.md").write_text(card(kind, held, facts, args, sample))
    return facts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="the text that bard was made from")
    parser.add_argument("--out", type=Path, default=Path("weights"))
    parser.add_argument("--kind", choices=list(KINDS), help="make only this one")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=int, default=16)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--bpe-dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    text = args.text.read_text(encoding="utf-8")
    for kind in [args.kind] if args.kind else KINDS:
        print(json.dumps({"adapter": kind, **make(kind, text, args)}))


if __name__ == "__main__":
    main()

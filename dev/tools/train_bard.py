"""Train `bard`, the built-in model, on one text file: tokenizer, network, evaluation and model card.

    python dev/tools/train_bard.py --text FILE [--out weights/bard] [--steps 3600 | --minutes 60] [--resume weights/bard]

The last tenth of the text is held out: neither the tokenizer nor the network sees it. The text is small (some 300,000
tokens), so overfitting is the problem. Against it there are dropout in the network, and BPE-dropout (Provilkov et al.
2020, arXiv 1910.13267) in the tokenizer, which cuts the text differently in every epoch and is annealed to zero near
the end. Matrices are trained by Muon (Jordan et al. 2024), which learns more from each pass than AdamW. The loss is in
bits per byte, which do not depend on the vocabulary.

`--steps` gives the same model on the same machine. `--minutes` trains for a time, with rates that follow the clock; the
model card has the number of steps. `--resume` begins with the weights and the tokenizer of another bard, which must
have been made from the same text, so that the held-out part stays held out. `--average` takes the mean of the final
weights and those of other bards: runs that began with the same one overfit each in its own way, and their mean
generalizes better (Wortsman et al. 2022, arXiv 2203.05482). With `--steps 0` only the mean is computed.

The network computes in bfloat16 and is updated in float32. bard itself was trained by commit ebf0027c, which drew
dropout and computed short attention faster on a CPU; the method is the same.

Needs `tokenizers`, a development dependency; the server does not.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from models import weights
from models.gpt2 import GPT, GPTConfig
from models.sources import catalog

EOT = "<|endoftext|>"
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # stored (in, out)
SHAPE = GPTConfig(vocab_size=4096, n_layer=6, n_head=4, n_embd=256, dropout=0.3)


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE with GPT-2's split pattern; the end-of-text token has the last id."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([EOT])
    return tokenizer


class Progress:
    """The completed share of the training, in steps or in minutes."""

    def __init__(self, steps: int, minutes: float | None) -> None:
        self.step = 0
        self.began = time.perf_counter()
        self._steps = steps
        self._seconds = minutes and minutes * 60

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @property
    def share(self) -> float:
        if self._seconds:
            return self.seconds / self._seconds
        return self.step / self._steps if self._steps else 1.0


def encode(tokenizer: Tokenizer, text: str, dropout: float | None = None) -> Tensor:
    """Encode `text`; each merge is skipped with probability `dropout`."""
    tokenizer.model.dropout = dropout
    ids = tokenizer.encode(text).ids
    tokenizer.model.dropout = None
    return torch.tensor(ids)


def batches(
    tokenizer: Tokenizer, text: str, args: argparse.Namespace, progress: Progress
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield (ids, targets, position) of `--tokens-per-step` tokens for each step until the end of the training.

    One step in four has the whole context of 1,024; the others have windows of 256, half of them at a
    random position, so that late positions are learned as well as early ones.
    """
    rng = random.Random(args.seed)
    data = torch.empty(0, dtype=torch.long)
    used = 0
    while progress.share < 1:
        if used >= len(data) - 1:
            share = min(1.0, max(0.0, (0.95 - progress.share) / 0.25))
            data = encode(tokenizer, text, args.bpe_dropout * share or None)
            used = 0
        T = 1024 if progress.step % 4 == 3 else 256
        starts = [rng.randrange(len(data) - T - 1) for _ in range(args.tokens_per_step // T)]
        window = torch.stack([data[s : s + T + 1] for s in starts])
        used += args.tokens_per_step
        position = rng.randrange(1024 - T + 1) if T < 1024 and progress.step % 2 else 0
        yield window[:, :-1], window[:, 1:], position
        progress.step += 1


@torch.no_grad()
def bits_per_byte(model: GPT, ids: Tensor, n_bytes: int, stride: int) -> float:
    """Return the loss of `ids` in bits per byte; each token sees at least the `1024 - stride` before it, if there are."""
    model.eval()
    nats, done = 0.0, 0
    while done < len(ids) - 1:
        end = min(done + stride if done else 1024, len(ids) - 1)
        start = max(0, end - 1024)
        targets = ids[start + 1 : end + 1].clone()
        targets[: done - start] = -1  # counted in an earlier window
        with torch.autocast(ids.device.type, torch.bfloat16):
            _, loss = model(ids[None, start:end], targets[None])
        nats += float(loss) * (end - done)
        done = end
    return nats / math.log(2) / n_bytes


def learning_rate(progress: Progress, args: argparse.Namespace) -> float:
    """Rise over 50 steps, stay until 40 % of the run, then fall in a straight line."""
    peak: float = args.lr
    return peak * min((progress.step + 1) / 50, 1.0, 0.01 + 0.99 * (1 - progress.share) / 0.6)


def optimizers(model: GPT, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if ".h." in n and p.dim() == 2]
    tables = [model.transformer.wte.weight, model.transformer.wpe.weight]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=True),
    ]


def backward(model: torch.nn.Module, x: Tensor, y: Tensor, position: int) -> float:
    """Add the gradients of (B, T) ids and targets, computed in bfloat16; return the mean loss in nats per token."""
    with torch.autocast(x.device.type, torch.bfloat16):
        _, loss = model(x, y, position)
    loss.backward()
    return float(loss.detach())


def train(model: GPT, tokenizer: Tokenizer, text: str, held_out: str, args: argparse.Namespace) -> Progress:
    """Train until the steps or the minutes are over; return the progress."""
    progress = Progress(args.steps, args.minutes)
    both = optimizers(model, args)
    ids = encode(tokenizer, held_out).to(args.device)
    sample = ids[: len(ids) // 4]
    sample_bytes = len(tokenizer.decode(sample.tolist()).encode())
    for x, y, position in batches(tokenizer, text, args, progress):
        for group in (group for optimizer in both for group in optimizer.param_groups):
            group["lr"] = learning_rate(progress, args)
        loss = backward(model.train(), x.to(args.device), y.to(args.device), position)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        if progress.step % 100 == 99:
            print(f"step {progress.step + 1:,}, {progress.share:.1%}, loss {loss:.3f}", file=sys.stderr)
        if progress.step % 300 == 299:
            held = bits_per_byte(model, sample, sample_bytes, 512)
            print(f"step {progress.step + 1:,}, held-out sample {held:.4f} bits/byte", file=sys.stderr)
    return progress


def average(model: GPT, others: list[dict[str, Tensor]]) -> None:
    """Set each weight of `model` to the mean of its own and those of the `others`."""
    for name, parameter in model.named_parameters():
        same = [parameter.data, *(other[name].to(parameter) for other in others)]
        parameter.data = torch.stack(same).mean(0)


def save(model: GPT, tokenizer: Tokenizer, out: Path) -> None:
    """Write a GPT2LMHeadModel folder: config, float16 weights (Conv1D layout), tokenizer files."""
    out.mkdir(parents=True, exist_ok=True)
    state = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        tensor = tensor.T if name.endswith(TRANSPOSED) else tensor
        state[name] = tensor.to("cpu", torch.float16).contiguous()
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    c = model.config
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": c.activation,
        "n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "n_positions": c.block_size,
        "vocab_size": c.vocab_size, "layer_norm_epsilon": c.layer_norm_epsilon, "torch_dtype": "float16",
        "bos_token_id": c.vocab_size - 1, "eos_token_id": c.vocab_size - 1,
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    tokenizer.model.save(str(out))
    vocab = json.loads((out / "vocab.json").read_text()) | {EOT: tokenizer.token_to_id(EOT)}
    (out / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False))
    (out / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024, "add_prefix_space": False,
                    "bos_token": EOT, "eos_token": EOT, "unk_token": EOT}, indent=1) + "\n"
    )  # fmt: skip


def card(args: argparse.Namespace, facts: dict[str, object]) -> str:
    return f"""# bard

A small GPT-2 that writes Shakespeare, built into effective-batching so that a server without a GPU and without
a network has something sensible to say. It knows nothing but the plays it was trained on.

| | |
|---|---|
| shape | {facts["shape"]} |
| parameters | {facts["parameters"]:,} |
| vocabulary | {facts["vocab"]:,} tokens: byte-level BPE with GPT-2's split pattern, learned from the training part alone |
| data | excerpts of Shakespeare's plays ("tiny shakespeare", public domain), {facts["bytes"]:,} bytes; the last tenth ({facts["held_bytes"]:,} bytes) held out |
| steps | {facts["steps"]:,} of {args.tokens_per_step:,} tokens, about {facts["epochs"]:.0f} passes; Muon, weight decay {args.weight_decay}, dropout {args.dropout}, BPE-dropout {args.bpe_dropout} annealed to 0{facts["before"]} |
| loss on the held-out text | **{facts["bpb"]:.4f} bits per byte** ({facts["nats"]:.3f} nats a token, {facts["bytes_per_token"]:.2f} bytes a token), float16 weights as stored, context 1,024, window moved by 256 |
| made | {facts["date"]}, {facts["machine"]}, {facts["minutes"]:.0f} minutes |
| command | `python dev/tools/train_bard.py --text shakespeare.txt {facts["length"]} --lr {args.lr:g} --seed {args.seed}{facts["resume"]}` |

For comparison: nanoGPT's character model of 10.6 M parameters reaches 1.47 nats a character, 2.12 bits per byte,
on this split. Files are in the format of `transformers`' `GPT2LMHeadModel`.

At temperature 0.8, from "ROMEO:":

```
{facts["sample"]}
```
"""


def judge(
    model: GPT, tokenizer: Tokenizer, text: str, held_out: str, args: argparse.Namespace, steps: int
) -> dict[str, object]:
    """Return the facts of the model card after `steps` steps on `text`, with the loss on `held_out`."""
    model.eval()
    ids = encode(tokenizer, held_out).to(args.device)
    held_bytes = len(held_out.encode())
    bpb = bits_per_byte(model, ids, held_bytes, 256)
    per_token = held_bytes / len(ids)
    averaged = " ".join(map(str, args.average))
    return {
        "shape": f"{SHAPE.n_layer} layers, width {SHAPE.n_embd}, {SHAPE.n_head} heads of {SHAPE.head_size}, context {SHAPE.block_size}",
        "parameters": sum(p.numel() for p in model.parameters()), "vocab": SHAPE.vocab_size,
        "bytes": len((text + held_out).encode()), "held_bytes": held_bytes, "steps": steps,
        "before": (f"; before that, those of the bard that it began with ({args.resume})" if args.resume else "")
        + (f"; then the mean of its weights and those of {averaged}" if averaged else ""),
        "resume": (f" --resume {args.resume}" if args.resume else "")
        + (f" --average {averaged}" if averaged else ""),
        "length": f"--minutes {args.minutes:g}" if args.minutes else f"--steps {steps}",
        "epochs": steps * args.tokens_per_step / len(encode(tokenizer, text)),
        "bpb": bpb, "nats": bpb * math.log(2) * per_token, "bytes_per_token": per_token,
        "date": date.today().isoformat(),
        "machine": f"{args.device}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "sample": write_sample(model, tokenizer, "ROMEO:", 160, args.seed),
    }  # fmt: skip


@torch.no_grad()
def write_sample(model: GPT, tokenizer: Tokenizer, prompt: str, n: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt).ids
    for _ in range(n):
        logits = model(torch.tensor([ids], device=model.lm_head.weight.device))[0][0, -1].float().cpu()
        ids.append(int(torch.multinomial(torch.softmax(logits / 0.8, 0), 1, generator=generator)))
    return tokenizer.decode(ids)


def weights_of(folder: Path, tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """Return the weights of the bard in `folder`. Raises ValueError if its tokens are not those of `tokenizer`."""
    if Tokenizer.from_file(str(folder / "tokenizer.json")).to_str() != tokenizer.to_str():
        raise ValueError(f"{folder} has other tokens. Use bards that began with the same one")
    return weights.load_gpt(catalog.resolve(str(folder))).state_dict()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="the text to learn")
    parser.add_argument("--out", type=Path, default=Path("weights/bard"))
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--minutes", type=float, help="train for this time instead of --steps")
    parser.add_argument("--resume", type=Path, help="begin with this bard, made from the same text")
    parser.add_argument("--average", type=Path, nargs="+", default=[], metavar="FOLDER",
                        help="take the mean of the final weights and those of these bards")  # fmt: skip
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.3, help="for the matrices")
    parser.add_argument("--bpe-dropout", type=float, default=0.2)
    parser.add_argument("--dropout", type=float, default=SHAPE.dropout)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    began = time.perf_counter()
    text = args.text.read_text(encoding="utf-8")
    split = len(text) * 9 // 10
    text, held_out = text[:split], text[split:]
    torch.manual_seed(args.seed)
    model = GPT(replace(SHAPE, dropout=args.dropout)).to(args.device)
    if args.resume:
        tokenizer = Tokenizer.from_file(str(args.resume / "tokenizer.json"))
        model.load_state_dict(weights_of(args.resume, tokenizer))
    else:
        tokenizer = train_tokenizer(text, SHAPE.vocab_size)
        model.init_weights()
    others = [weights_of(folder, tokenizer) for folder in args.average]
    steps = train(model, tokenizer, text, held_out, args).step
    average(model, others)

    for parameter in model.parameters():  # evaluate the weights as they are stored
        parameter.data = parameter.data.half().float()
    save(model, tokenizer, args.out)
    facts = judge(model, tokenizer, text, held_out, args, steps)
    facts["minutes"] = (time.perf_counter() - began) / 60
    (args.out / "README.md").write_text(card(args, facts))
    print(json.dumps({"bits_per_byte": facts["bpb"], "steps": steps, "out": str(args.out)}))


if __name__ == "__main__":
    main()

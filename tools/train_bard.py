"""Train `bard`, the built-in model, on one text file: tokenizer, network, evaluation and model card.

    python tools/train_bard.py --text FILE [--out models/bard] [--steps 1500]

The last tenth of the text is held out: neither the tokenizer nor the network sees it. The text is small
(some 300,000 tokens), so the fight is against learning it by heart: dropout in the network, and BPE-dropout
(Provilkov et al. 2020, arXiv 1910.13267) in the tokenizer, which cuts the text differently in every epoch and
is annealed to none. The loss is stated in bits per byte, which does not depend on the vocabulary.

Needs `tokenizers`, a development dependency; the server does not.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from model import GPT, GPTConfig

EOT = "<|endoftext|>"
SHAPE = GPTConfig(vocab_size=4096, n_layer=6, n_head=4, n_embd=256, dropout=0.2)
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE with GPT-2's split pattern; the end-of-text token has the last id."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([EOT])
    return tokenizer


def encode(tokenizer: Tokenizer, text: str, dropout: float | None = None) -> torch.Tensor:
    """Encode `text`, each merge left out with probability `dropout`."""
    tokenizer.model.dropout = dropout
    ids = tokenizer.encode(text).ids
    tokenizer.model.dropout = None
    return torch.tensor(ids)


def batches(tokenizer: Tokenizer, text: str, args: argparse.Namespace, rng: random.Random):
    """Yield (ids, targets, position) of `--tokens-per-step` tokens for each step.

    One step in four has the whole context of 1,024; the others have windows of 256, half of them at a
    random position, so that late positions are learned as well as early ones.
    """
    data = torch.empty(0, dtype=torch.long)
    used = 0
    for step in range(args.steps):
        if used >= len(data) - 1:
            progress = step / args.steps
            data = encode(tokenizer, text, args.bpe_dropout * (1 - progress) or None)
            used = 0
        T = 1024 if step % 4 == 3 else 256
        starts = [rng.randrange(len(data) - T - 1) for _ in range(args.tokens_per_step // T)]
        window = torch.stack([data[s : s + T + 1] for s in starts])
        used += args.tokens_per_step
        position = rng.randrange(1024 - T + 1) if T < 1024 and step % 2 else 0
        yield window[:, :-1], window[:, 1:], position


@torch.no_grad()
def bits_per_byte(model: GPT, ids: torch.Tensor, n_bytes: int, stride: int) -> float:
    """Return the loss of `ids` in bits per byte; each token sees at least `1024 - stride` tokens before it."""
    model.eval()
    nats = 0.0
    for end in range(stride, len(ids) + stride, stride):
        end = min(end, len(ids) - 1)
        start = max(0, end - 1024)
        new = min(stride, end - start) if start else end
        targets = ids[start + 1 : end + 1].clone()
        targets[: len(targets) - new] = -1
        with torch.autocast(ids.device.type, torch.bfloat16):
            _, loss = model(ids[None, start:end], targets[None])
        nats += loss.item() * new
        if end == len(ids) - 1:
            break
    model.train()
    return nats / math.log(2) / n_bytes


def learning_rate(step: int, args: argparse.Namespace) -> float:
    warmup = min(1.0, (step + 1) / 50)
    return args.lr * warmup * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))


def train(
    model: GPT, tokenizer: Tokenizer, text: str, held_out: str, args: argparse.Namespace
) -> None:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, 0.98), fused=True,
    )  # fmt: skip
    ids = encode(tokenizer, held_out).to(args.device)
    sample = ids[: len(ids) // 4]
    sample_bytes = len(tokenizer.decode(sample.tolist()).encode())
    began = time.perf_counter()
    model.train()
    for step, (x, y, position) in enumerate(
        batches(tokenizer, text, args, random.Random(args.seed))
    ):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        with torch.autocast(args.device, torch.bfloat16):
            _, loss = model(x.to(args.device), y.to(args.device), position)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 25 == 24:
            seconds = time.perf_counter() - began
            eta = seconds / (step + 1) * (args.steps - step - 1)
            line = f"step {step + 1}/{args.steps} loss {loss.item():.3f} {seconds:.0f} s, {eta:.0f} s left"
            if step % 150 == 149:
                line += f", held-out sample {bits_per_byte(model, sample, sample_bytes, 512):.4f} bits/byte"
            print(line, file=sys.stderr, flush=True)


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
| steps | {args.steps:,} of {args.tokens_per_step:,} tokens, about {facts["epochs"]:.0f} passes; dropout {facts["dropout"]}, BPE-dropout {args.bpe_dropout} annealed to 0 |
| loss on the held-out text | **{facts["bpb"]:.4f} bits per byte** ({facts["nats"]:.3f} nats a token, {facts["bytes_per_token"]:.2f} bytes a token), float16 weights as stored, context 1,024, window moved by 256 |
| made | {facts["date"]}, {facts["machine"]}, {facts["minutes"]:.0f} minutes |
| command | `python tools/train_bard.py --text shakespeare.txt --steps {args.steps} --seed {args.seed}` |

For comparison: nanoGPT's character model of 10.6 M parameters reaches 1.47 nats a character, 2.12 bits per byte,
on this split. Files are in the format of `transformers`' `GPT2LMHeadModel`.

At temperature 0.8, from "ROMEO:":

```
{facts["sample"]}
```
"""


@torch.no_grad()
def write_sample(model: GPT, tokenizer: Tokenizer, prompt: str, n: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt).ids
    for _ in range(n):
        logits = (
            model(torch.tensor([ids], device=model.lm_head.weight.device))[0][0, -1].float().cpu()
        )
        ids.append(int(torch.multinomial(torch.softmax(logits / 0.8, 0), 1, generator=generator)))
    return tokenizer.decode(ids)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="the text to learn")
    parser.add_argument("--out", type=Path, default=Path("models/bard"))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--bpe-dropout", type=float, default=0.15)
    parser.add_argument("--dropout", type=float, default=SHAPE.dropout)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    began = time.perf_counter()
    text = args.text.read_text(encoding="utf-8")
    split = len(text) * 9 // 10
    text, held_out = text[:split], text[split:]
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(text, SHAPE.vocab_size)
    model = GPT(replace(SHAPE, dropout=args.dropout)).to(args.device)
    model.init_weights()
    train(model, tokenizer, text, held_out, args)

    for parameter in model.parameters():  # judge what is stored
        parameter.data = parameter.data.half().float()
    save(model, tokenizer, args.out)
    model.eval()
    ids = encode(tokenizer, held_out).to(args.device)
    held_bytes = len(held_out.encode())
    bpb = bits_per_byte(model, ids, held_bytes, 256)
    per_token = held_bytes / len(ids)
    facts = {
        "shape": f"{SHAPE.n_layer} layers, width {SHAPE.n_embd}, {SHAPE.n_head} heads of {SHAPE.head_size}, context {SHAPE.block_size}",
        "parameters": sum(p.numel() for p in model.parameters()), "vocab": SHAPE.vocab_size,
        "bytes": len((text + held_out).encode()), "held_bytes": held_bytes, "dropout": args.dropout,
        "epochs": args.steps * args.tokens_per_step / len(encode(tokenizer, text)),
        "bpb": bpb, "nats": bpb * math.log(2) * per_token, "bytes_per_token": per_token,
        "date": date.today().isoformat(), "minutes": (time.perf_counter() - began) / 60,
        "machine": f"{args.device}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "sample": write_sample(model, tokenizer, "ROMEO:", 160, args.seed),
    }  # fmt: skip
    (args.out / "README.md").write_text(card(args, facts))
    print(json.dumps({"bits_per_byte": bpb, "steps": args.steps, "out": str(args.out)}))


if __name__ == "__main__":
    main()

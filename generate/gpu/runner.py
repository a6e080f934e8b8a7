"""The model at work on a GPU: one plan in, one token for each sequence due out, as `generate/runner.py` has it.

Decodes are one replayed graph over state that lies on the device; pieces of prompts are one packed row of tokens,
launched kernel by kernel. What the device cannot draw is drawn by the host from copied logits, by the same rule.
Nothing but speed depends on there being a GPU: on a CPU the same steps run with plain PyTorch, which is how they are
tested. It must not know HTTP, queues or policies.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
from collections.abc import Sequence as Many
from dataclasses import replace

import torch
from torch import Tensor

from generate.gpu import choose, sampling
from generate.gpu.attention import Prompts
from generate.gpu.decoder import Decoder
from generate.gpu.graphs import BUCKETS
from generate.gpu.layers import Network
from generate.gpu.rows import Rows, upload
from generate.params import GREEDY
from generate.runner import ModelRunner, rows_due
from generate.sampling import NotFinite
from models.gpt2 import GPT
from scheduling.iteration import Plan
from scheduling.scheduler import Output
from scheduling.sequence import Sequence

log = logging.getLogger(__name__)

CAPACITY = 64
WARM_UP_TOKENS = 64


class GpuRunner(ModelRunner):
    """Computes plans for one model over one pool of KV pages, at most `capacity` decodes in one launch.

    `strict` makes every number of a row independent of its company, at some cost in speed. keys and values: (layers, pages, heads, page size, head size) of the model's dtype.
    """

    def __init__(
        self, model: GPT, n_pages: int, page_size: int, capacity: int = CAPACITY, strict: bool = False
    ) -> None:
        self.config = c = model.config
        self.page_size = page_size
        weight = model.lm_head.weight
        self.device, self.dtype = weight.device, weight.dtype
        shape = (c.n_layer, n_pages, c.n_head, page_size, c.head_size)
        self.keys = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.values = torch.empty_like(self.keys)
        self._stream = None
        if self.device.type == "cuda":  # the default stream cannot be recorded
            self._stream = torch.cuda.Stream(self.device)
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._on_stream():
            self._choose(model, max(capacity, BUCKETS[0]), strict)

    @torch.inference_mode()
    def _choose(self, model: GPT, capacity: int, strict: bool) -> None:
        """Take what serves here, each part tried once against plain PyTorch."""
        pages = -(-self.config.block_size // self.page_size)
        pool, where = self.keys.shape[1:], (self.dtype, self.device)
        self.attend = choose.make_decode(capacity, pages, pool, *where)
        if strict and self.attend.name == "torch" and self.device.type == "cuda":
            raise RuntimeError(
                "--batch-invariant needs Triton's kernels, but they do not run on this machine; see the log. "
                "Leave it out"
            )
        self.attend_prompts = choose.make_prompts(pool, *where)
        self.network = Network(model, choose.make_math(strict, self.config.activation, *where))
        rows = Rows(capacity, pages, self.device)
        self.decoder = Decoder(rows, self._row_logits, self.config.block_size)

    @torch.inference_mode()
    def warm_up(self) -> bool:
        """Record the steps and run a prompt; return whether its logits are finite, as 16 bits may not be."""
        with self._on_stream():
            self.decoder.warm_up()
            count = min(WARM_UP_TOKENS, self.config.block_size, self.page_size)
            step = self.config.vocab_size // count or 1
            ids = [i * step % self.config.vocab_size for i in range(count)]
            seq = Sequence(ids, 1, sampling=GREEDY, pages=[0])
            return bool(self._prompt_logits(Plan(0, 0.0, [seq], [count]), 0).isfinite().all())

    @torch.inference_mode()
    def forward(self, plan: Plan) -> list[Output]:
        """Compute one step; return for each sequence of the plan its next token, None while its prompt lasts."""
        decodes = [i for i, seq in enumerate(plan.sequences) if _decodes(seq)]
        pieces = [i for i, seq in enumerate(plan.sequences) if not _decodes(seq)]
        prompts = replace(plan, sequences=[plan.sequences[i] for i in pieces], counts=[plan.counts[i] for i in pieces])
        held = [seq for seq in plan.held if seq.pages] if plan.padded else []
        alike = all(count < seq.pending for seq, count in zip(prompts.sequences, prompts.counts))
        outputs: list[Output] = [None] * len(plan.sequences)
        try:
            with self._on_stream():
                # Launched before anybody waits for the decodes, so that the device has work until the end.
                logits = self._prompt_logits(prompts, plan.padding) if pieces else None
                members = [plan.sequences[i] for i in decodes]
                for i, output in zip(decodes, self._decode(members, held, alike)):
                    outputs[i] = output
                if logits is not None:
                    for i, output in zip(pieces, self._draw_after(prompts, logits)):
                        outputs[i] = output
        except BaseException:
            self.decoder.forget()
            raise
        return outputs

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    def _decode(self, sequences: list[Sequence], held: list[Sequence], alike: bool) -> list[Output]:
        """Return the outputs of decodes; `alike`: the next step's will be the same, but for who is done."""
        capacity, members = self.decoder.rows.capacity, [*sequences, *held]
        # A policy with more slots may have come while the server runs: then in turns, none of them ahead.
        alike = alike and len(members) <= capacity
        outputs: list[Output] = []
        for first in range(0, len(members), capacity):
            part = sequences[first : first + capacity]
            dead = members[first + len(part) : first + capacity]
            outputs += self._decode_part(part, dead, alike)
        return outputs

    def _decode_part(self, sequences: list[Sequence], held: list[Sequence], alike: bool) -> list[Output]:
        if not all(sampling.draws(seq.sampling) for seq in sequences):
            return self._draw_on_host(sequences, held)
        goes_on = any(seq.max_tokens - len(seq.output_ids) > 1 for seq in sequences)
        tokens = self.decoder.decode(sequences, held, go_ahead=alike and goes_on)
        if sampling.TOO_FLAT in tokens:
            return self._draw_on_host(sequences, held)
        return [NotFinite() if token < 0 else token for token in tokens]

    def _draw_on_host(self, sequences: list[Sequence], held: list[Sequence]) -> list[Output]:
        """Compute a step and draw all its tokens by the rule's own code; nothing has moved, so it may be a repeat."""
        logits = self.decoder.logits(sequences, held).cpu()
        return self._sample(Plan(0, 0.0, sequences, [1] * len(sequences)), logits)

    def _row_logits(self, rows: Rows, size: int) -> Tensor:
        """Return the logits of the first rows, each of which decodes its token."""
        length, tables = rows.length[:size], rows.tables[:size]

        def attend(layer: int, qkv: Tensor, scale: float) -> Tensor:
            return self.attend(qkv, self.keys[layer], self.values[layer], length, tables, scale)

        return self.network.logits(rows.token[:size], (length - 1).clamp(min=0), attend)

    def _draw_after(self, prompts: Plan, logits: Tensor) -> list[Output]:
        """Return the outputs of pieces of prompts from the logits of their rows due."""
        due = [i for i, s in enumerate(prompts.sequences) if prompts.counts[i] == s.pending]
        members = [prompts.sequences[i] for i in due]
        params = [seq.sampling for seq in members]
        on_device = len(due) == len(logits) and all(map(sampling.draws, params))
        tokens = []
        if on_device and due:
            tokens = sampling.draw_now(logits, params, [seq.length for seq in members])
        if not on_device or sampling.TOO_FLAT in tokens:
            return self._sample(prompts, logits.cpu())
        outputs: list[Output] = [None] * len(prompts.sequences)
        for i, token in zip(due, tokens):
            outputs[i] = NotFinite() if token < 0 else token
        return outputs

    def _prompt_logits(self, prompts: Plan, padding: int) -> Tensor:
        """Return the logits of the rows due, after the pieces' keys and values are written."""
        sequences, counts = prompts.sequences, prompts.counts
        ids: list[int] = []
        places: list[int] = []
        due: list[int] = []
        for seq, count in zip(sequences, counts):
            ids += seq.tokens(seq.computed, count)
            places += range(seq.computed, seq.computed + count)
            due += range(len(ids) - rows_due(seq, count), len(ids))
        pieces = self._prompts(sequences, counts)
        numbers = torch.tensor([ids + [0] * padding, places + [0] * padding])
        tokens, where = upload(numbers, self.device)

        def attend(layer: int, qkv: Tensor, scale: float) -> Tensor:
            return self.attend_prompts(qkv, self.keys[layer], self.values[layer], pieces, scale)

        chosen = upload(torch.tensor(due, dtype=torch.long), self.device)
        return self.network.logits(tokens, where, attend, chosen)

    def _prompts(self, sequences: Many[Sequence], counts: Many[int]) -> Prompts:
        """Say where the tokens of pieces lie, new and past."""
        size = self.page_size
        lengths = [seq.computed + count for seq, count in zip(sequences, counts)]
        whole = [
            [seq.pages[place // size] * size + place % size for place in range(length)]
            for seq, length in zip(sequences, lengths)
        ]
        new = [slots[len(slots) - count :] for slots, count in zip(whole, counts)]
        fresh = upload(torch.tensor([*itertools.chain(*new)]), self.device)
        past = None
        if any(seq.computed for seq in sequences):
            slots = upload(torch.tensor([*itertools.chain(*whole)]), self.device)
            past = torch.stack((slots // size, slots % size))
        queries = [0, *itertools.accumulate(counts)]
        contexts = [0, *itertools.accumulate(lengths)]
        cuts = upload(torch.tensor([queries, contexts], dtype=torch.int32), self.device)
        return Prompts(queries, contexts, cuts, fresh // size, fresh % size, past)


def make_runner(model: GPT, n_pages: int, page_size: int, capacity: int, strict: bool, any_format: bool) -> GpuRunner:
    """Return a runner that is warm: kernels compiled, graphs recorded, a prompt computed.

    With `any_format`, a model whose numbers are too large for float16 goes on in bfloat16. The model is used up.
    """
    runner = GpuRunner(model, n_pages, page_size, capacity, strict)
    if runner.warm_up():
        return runner
    if any_format and runner.dtype == torch.float16:
        log.warning("this model's values are too large for float16; using bfloat16")
        del runner
        gc.collect()  # it is part of circles, and its pages make room for the next one's
        return make_runner(model.to(torch.bfloat16), n_pages, page_size, capacity, strict, False)
    log.warning("this model's logits are not finite in %s. Use another --dtype, or check the checkpoint", runner.dtype)
    return runner


def _decodes(seq: Sequence) -> bool:
    """Whether a sequence has one token to compute, and that one was generated."""
    return seq.pending == 1 and bool(seq.output_ids)

"""The model at work on a GPU: the same plans and outputs as `generate/runner.py`.

Decodes are one replayed graph over state on the device; pieces of prompts are another, over one packed row of tokens.
The host draws, by the same rule, the tokens that the device cannot draw. Only the speed depends on a GPU: on a CPU the
same steps run in plain PyTorch, which is how they are tested. It must not know HTTP, queues or policies.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from generate.constraint import fill, filling
from generate.gpu import choose, sampling
from generate.gpu.attention import DecodeRows
from generate.gpu.decoder import Decoder, Following
from generate.gpu.graphs import BUCKETS
from generate.gpu.layers import Network
from generate.gpu.prefill import Prefill
from generate.gpu.rows import Download, Rows, upload
from generate.grammar import FormError
from generate.packing import add_embeddings, pack, sample_outputs
from generate.params import GREEDY
from generate.runner import Runner
from generate.sampling import NotFinite
from models.architecture import Reach
from models.gpt2 import GPT
from models.network import Network as Weights
from scheduling.iteration import Plan
from scheduling.scheduler import Output
from scheduling.sequence import Sequence

log = logging.getLogger(__name__)

CAPACITY = 64
WARM_UP_TOKENS = 64


class GpuRunner(Runner):
    """The runner for GPUs, with at most `capacity` decodes in one launch.

    `strict` makes every number of a row independent of the batch, at some cost in speed.
    """

    def __init__(
        self, model: Weights | GPT, n_pages: int, page_size: int, capacity: int = CAPACITY, strict: bool = False
    ) -> None:
        weights = model.network()
        super().__init__(weights, n_pages, page_size)
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":  # the default stream cannot be recorded
            new_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
            self._stream = new_stream(self.device)
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._on_stream():
            self._choose(weights, max(capacity, BUCKETS[0]), strict)

    @torch.inference_mode()
    def _choose(self, model: Weights, capacity: int, strict: bool) -> None:
        """Choose the implementation of each part, after one comparison with plain PyTorch."""
        pages = -(-self.config.block_size // self.page_size)
        pool, target = self.keys.shape[1:], (self.dtype, self.device)
        self.attend = choose.make_decode(capacity, pages, model.config, pool, *target)
        attend_prompts = choose.make_prompts(model.config, pool, *target)
        if strict and self.device.type == "cuda" and "torch" in (self.attend.name, attend_prompts.name):
            raise RuntimeError(
                "--batch-invariant needs Triton's kernels, but they do not run on this machine; see the log. "
                "Leave it out"
            )
        self.attention = self.attend.name
        self.network = Network(model, choose.make_math(strict, model.config, *target))
        self.prefill = Prefill(self.network.states, attend_prompts, self.keys, self.values, pages)
        rows, draw = Rows(capacity, pages, self.device), choose.make_draw(self.config.vocab_size, self.device)
        self.decoder = Decoder(rows, self._row_logits, self.page_size, draw)

    @property
    def kernels(self) -> dict[str, str]:
        """The implementation of each part that has a fast one."""
        ways = ["graphs" if hasattr(part.replayer, "graphs") else "launched" for part in (self.decoder, self.prefill)]
        return {"decode": self.attend.name, "prompts": self.prefill.attend.name, "layers": self.network.math.name,
                "drawing": "triton" if self.decoder.fast_draw else "torch",
                "decode steps": ways[0], "prompt steps": ways[1]}  # fmt: skip

    @torch.inference_mode()
    def warm_up(self) -> bool:
        """Record the steps and compute a prompt; return whether its logits are finite, as 16 bits may overflow."""
        with self._on_stream():
            self.decoder.warm_up()
            self.prefill.warm_up()
            count = min(WARM_UP_TOKENS, self.config.block_size, self.page_size)
            step = self.config.vocab_size // count or 1
            ids = [i * step % self.config.vocab_size for i in range(count)]
            seq = Sequence(ids, 1, sampling=GREEDY, pages=[0])
            return bool(self._compute_prompts([seq], [count], 0, [])[0].isfinite().all())

    @torch.inference_mode()
    def forward(self, plan: Plan) -> list[Output]:
        """See `Runner.forward`."""
        drafted = plan.drafts or [[]] * len(plan.sequences)  # decodes with drafts are computed like pieces of prompts
        decodes = [i for i, seq in enumerate(plan.sequences) if _decodes(seq) and not drafted[i]]
        pieces = [i for i, seq in enumerate(plan.sequences) if not _decodes(seq) or drafted[i]]
        prompts, counts = [plan.sequences[i] for i in pieces], [plan.counts[i] for i in pieces]
        drafts = [drafted[i] for i in pieces] if plan.drafts else []
        held = [seq for seq in plan.held if seq.pages] if plan.padded else []
        outputs: list[Output] = [None] * len(plan.sequences)
        try:
            with self._on_stream():
                # Launched before the host waits for the decodes, so that the device has work until the end.
                computed = self._compute_prompts(prompts, counts, plan.padding, drafts) if pieces else None
                drawn = None if computed is None else self._draw_prompts(prompts, counts, computed[0], drafts)
                members = [plan.sequences[i] for i in decodes]
                following = self._following(plan, members, prompts, counts, drawn)
                for i, output in zip(decodes, self._decode(members, held, following)):
                    outputs[i] = output
                if computed is not None:
                    sampled = self._sample_prompts(prompts, counts, computed[0], drafts, drawn)
                    for i, output in zip(pieces, sampled):
                        outputs[i] = output
                    add_embeddings(outputs, plan.sequences, plan.counts, computed[1])
        except BaseException:
            self.decoder.forget()
            raise
        plan.mask_seconds += filling.take()
        return outputs

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    def _following(
        self, plan: Plan, decodes: list[Sequence], prompts: list[Sequence], counts: list[int], drawn: Download | None
    ) -> Following:
        """Return who is likely to decode in the next step, if the device has or will have a token of each of them."""
        if drawn is None and any(count >= seq.pending for seq, count in zip(prompts, counts)):
            return Following()
        ready = [prompts[i] for i in _ready(prompts, counts)]
        # Where prompts have steps of their own, decodes are paused, and the next step may be such a step again.
        if ready and (any(map(_decodes, plan.paused)) or any(seq.sampling.grammar is not None for seq in ready)):
            return Following()
        context = self.config.block_size
        staying = [s for s in decodes if len(s.output_ids) + 1 < s.max_tokens and s.computed + 1 < context]
        going_on = [len(s.output_ids) + 1 < s.max_tokens and s.length < context for s in ready]
        return Following(staying, {seq: i for i, seq in enumerate(ready) if going_on[i]}, drawn)

    def _decode(self, sequences: list[Sequence], held: list[Sequence], following: Following) -> list[Output]:
        """Return the outputs of decodes, of which there may be none; launch the step of those `following`."""
        capacity, members = self.decoder.rows.capacity, [*sequences, *held]
        if len(members) <= capacity:
            return self._decode_part(sequences, held, following) if members or following.joining else []
        # After a switch to a policy with more slots, members exceed the capacity: they take turns, none of them ahead.
        outputs: list[Output] = []
        for first in range(0, len(members), capacity):
            part = sequences[first : first + capacity]
            outputs += self._decode_part(part, members[first + len(part) : first + capacity], Following())
        return outputs

    def _decode_part(self, sequences: list[Sequence], held: list[Sequence], following: Following) -> list[Output]:
        if not all(sampling.draws(seq.sampling) for seq in sequences):
            return self._draw_on_host(sequences, held)
        if any(seq.sampling.grammar is not None for seq in sequences):
            return self._decode_bound(sequences, held)
        tokens = self.decoder.decode(sequences, held, following)
        if sampling.TOO_FLAT in tokens:
            return self._draw_on_host(sequences, held)
        return [*map(_outcome, tokens)]

    def _decode_bound(self, sequences: list[Sequence], held: list[Sequence]) -> list[Output]:
        """Return the outputs of decodes, some of which have forms: only their tokens are drawn again, behind their masks."""
        flight, logits = self.decoder.launch(sequences, held)
        bound = _draw_bound(logits, sequences)
        tokens = [bound.get(i, token) for i, token in enumerate(flight.read(sequences))]
        if sampling.TOO_FLAT in tokens:
            return self._draw_on_host(sequences, held)
        return [*map(_outcome, tokens)]

    def _draw_on_host(self, sequences: list[Sequence], held: list[Sequence]) -> list[Output]:
        """Compute a step and draw all its tokens on the host.

        The step may repeat one that was just computed: no sequence has advanced, so it writes the same keys and values.
        """
        _, logits = self.decoder.launch(sequences, held)
        return sample_outputs(sequences, [1] * len(sequences), logits.cpu())

    def _row_logits(self, rows: Rows, size: int) -> Tensor:
        """Return the logits [size, V] of the first rows, each of which decodes its token."""
        context_lens = rows.context_lens[:size]
        attend = functools.partial(self._attend_rows, DecodeRows(context_lens, rows.block_tables[:size]))
        return self.network.logits(self.network.states(rows.token[:size], (context_lens - 1).clamp(min=0), attend))

    def _attend_rows(self, rows: DecodeRows, layer: int, qkv: Tensor, scale: float, reach: Reach) -> Tensor:
        return self.attend(qkv, self.keys[layer], self.values[layer], rows, scale, reach)

    def _draw_prompts(
        self, prompts: list[Sequence], counts: list[int], logits: Tensor, drafts: list[list[int]]
    ) -> Download | None:
        """Launch the drawing of the complete prompts' tokens; None if the host has to draw, or there are none."""
        members = [prompts[i] for i in _ready(prompts, counts)]
        if drafts or not members or len(members) != len(logits):
            return None
        return Download(_draw(logits, members)) if all(sampling.draws(seq.sampling) for seq in members) else None

    def _sample_prompts(
        self,
        prompts: list[Sequence],
        counts: list[int],
        logits: Tensor,
        drafts: list[list[int]],
        drawn: Download | None,
    ) -> list[Output]:
        """Return the outputs of pieces of prompts, and of decodes with drafts, from the logits of their sample rows."""
        if drawn is None:
            return sample_outputs(prompts, counts, logits.cpu(), drafts)
        ready = _ready(prompts, counts)
        bound = _draw_bound(logits, [prompts[i] for i in ready])
        tokens = [bound.get(i, token) for i, token in enumerate(drawn.read())]
        if sampling.TOO_FLAT in tokens:
            return sample_outputs(prompts, counts, logits.cpu())
        outputs: list[Output] = [None] * len(prompts)
        for i, token in zip(ready, tokens):
            outputs[i] = _outcome(token)
        return outputs

    def _compute_prompts(
        self, prompts: list[Sequence], counts: list[int], padding: int, drafts: list[list[int]]
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of the rows to sample and the states of those to pool; write the pieces' keys and values."""
        ids, positions, sample_rows, pool_rows = pack(prompts, counts, drafts)
        filler = [0] * padding
        states = self.prefill.compute(ids + filler, positions + filler, prompts, counts)
        some = upload(torch.tensor(sample_rows + pool_rows, dtype=torch.long), self.device)
        x = states.index_select(0, some)  # (R + P, C)
        R = len(sample_rows)
        return self.network.logits(x[:R]), x[R:]


def make_runner(
    model: Weights | GPT, n_pages: int, page_size: int, capacity: int, strict: bool, any_format: bool
) -> GpuRunner:
    """Return a warm runner: kernels compiled, graphs recorded, a prompt computed.

    With `any_format`, a model whose values are too large for float16 runs in bfloat16. The model cannot be used again.
    """
    runner = GpuRunner(model, n_pages, page_size, capacity, strict)
    if runner.warm_up():
        return runner
    if any_format and runner.dtype == torch.float16:
        log.warning("this model's values are too large for float16; using bfloat16")
        del runner
        gc.collect()  # the runner is part of reference cycles, and the next one needs the memory of its pages
        return make_runner(model.to(torch.bfloat16), n_pages, page_size, capacity, strict, False)
    log.warning("this model's logits are not finite in %s. Use another --dtype, or check the checkpoint", runner.dtype)
    return runner


def _draw_bound(logits: Tensor, sequences: list[Sequence]) -> dict[int, int | FormError]:
    """Return the tokens of the sequences that have forms, by index; logits [n, V], of which row i is of sequence i.

    The host fills the masks while the device computes the logits.
    """
    rows = [i for i, seq in enumerate(sequences) if seq.sampling.grammar is not None]
    if not rows:
        return {}
    members = [sequences[i] for i in rows]
    masks = fill([seq.sampling.grammar for seq in members], [seq.output_ids for seq in members])
    bits = upload(torch.from_numpy(masks.bits), logits.device)
    own = logits.index_select(0, upload(torch.tensor(rows), logits.device))
    tokens = _draw(sampling.restrict(own, bits), members).tolist()
    return {row: masks.errors.get(k, tokens[k]) for k, row in enumerate(rows)}


def _draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Launch the drawing of the next token of each sequence from its row of logits; return them on the device."""
    params = [seq.sampling for seq in sequences]
    drawing = sampling.drawing_for(params)
    numbers = [[sampling.key_of(p.seed) for p in params], [s.length for s in sequences], [p.top_k for p in params]]
    keys, lengths, top_k = upload(torch.tensor(numbers), logits.device)
    floats = torch.tensor([[p.inverse_temperature for p in params], [p.top_p for p in params]], dtype=torch.float64)
    inverse, top_p = upload(floats, logits.device)
    return sampling.draw(logits, keys, lengths, inverse, top_k, top_p, drawing)


def _outcome(token: int | FormError) -> Output:
    return NotFinite() if isinstance(token, int) and token < 0 else token


def _ready(prompts: list[Sequence], counts: list[int]) -> list[int]:
    """Return which prompts are complete after pieces of `counts` tokens, embedded ones apart."""
    return [i for i, seq in enumerate(prompts) if counts[i] == seq.pending and seq.sampling.pooling is None]


def _decodes(seq: Sequence) -> bool:
    """Return whether the one token that a sequence has to compute was generated."""
    return seq.pending == 1 and bool(seq.output_ids)

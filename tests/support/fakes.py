"""A model and a tokenizer that do what a test tells them, and an engine of both."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, NamedTuple

from flask import Flask

import policies
from api.service import LoadedEngine
from batching import BatchingManager, Inference
from generate.grammar import Grammars
from generate.text import AnswerText
from models.text.tool_format import HERMES
from scheduling.advance import TokenRun, run_of
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Output, Token
from tests.support import SOON, wait_until

EOT = "<|endoftext|>"
ALPHABET = range(ord("a"), ord("z") + 1)
SAMPLING = {
    "temperature", "top_k", "top_p", "seed", "ignore_eos", "min_p", "typical_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "prompt_logprobs", "grammar", "pooling",
}  # fmt: skip


class FakeTokenizer:
    """A byte is a token; token 256 ends a text. Counts what it is asked."""

    vocab_size = 257
    longest_token = 4
    bos_ids: tuple[int, ...] = ()
    eos_ids = (256,)
    special_ids = frozenset([256])
    chat_template: Any = None
    tool_format = HERMES
    vocabulary = SimpleNamespace(encode=lambda text: [*text.encode()], encode_rest=None)

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, text: str, end_of_text: Any = "text") -> list[int]:
        self.encoded += 1
        if end_of_text == "special":
            parts = text.split(EOT)
            return [t for i, part in enumerate(parts) for t in ([256] * (i > 0) + list(part.encode()))]
        return list(text.encode())

    def encode_chat(self, messages: Any, add_generation_prompt: bool = True, **more: Any) -> tuple[str, list[int]]:
        text, ids = self.chat_template(messages, add_generation_prompt)
        return text, ids

    def token_bytes(self, token: int) -> bytes:
        return EOT.encode() if token == 256 else bytes([token])

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        return b"".join(map(self.token_bytes, tokens))

    def decode(self, tokens: Iterable[int], *, begins: bool = False) -> str:
        return self.decode_bytes(tokens).decode("utf-8", "replace")


class FakeDetail(NamedTuple):
    """What a model tells of a token: its log probability and rank, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int = 1


class FakeModel:
    """Answers a, b, c, ... or what `says` has, as many tokens at once as drafts are right.

    `gate` holds its steps. `before` is called with each plan and may wait or raise, `breaks` may change the outputs.
    """

    def __init__(self, says: Sequence[int] = ALPHABET) -> None:
        self.says = says
        self.plans = 0
        self.computed: list[list[str]] = []  # the ids of each step
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.before: Callable[[Plan], None] = lambda plan: None
        self.breaks: Callable[[Plan, list[Output]], list[Output]] = lambda plan, outputs: outputs

    def forward(self, plan: Plan) -> list[Output]:
        self.plans += 1
        self.computed.append([seq.id for seq in plan.sequences])
        self.entered.set()
        assert self.gate.wait(SOON)
        self.before(plan)
        rows = zip_longest(plan.sequences, plan.counts, plan.drafts)
        return self.breaks(plan, [self.output(s, drafts or ()) if n >= s.pending else None for s, n, drafts in rows])

    def output(self, seq: Any, drafts: Sequence[int]) -> Output:
        at = len(seq.output_ids)
        if (seq.sampling or {}).get("pooling"):
            return Token(0, None, [array("f", [seq.prompt_ids[0] / 256, 0.0, 1.0, len(seq.prompt_ids)])])
        tokens = [self.says[i % len(self.says)] for i in range(at, at + len(drafts) + 1)]
        if drafts:
            return TokenRun(run_of(drafts, tokens))
        wanted, of_prompt = ((seq.sampling or {}).get(n) for n in ("logprobs", "prompt_logprobs"))
        if wanted is None and of_prompt is None:
            return tokens[0]
        own = None if wanted is None else detail(tokens[0], wanted)
        scored = [] if of_prompt is None or at else seq.prompt_ids[1:]
        return Token(tokens[0], own, [detail(t, of_prompt) for t in scored])


def detail(token: int, wanted: int) -> FakeDetail:
    """Return what the fake model tells: the token itself is the likeliest, with the log of 1/2."""
    others = [((token + i) % 256, -1.0 - i) for i in range(1, wanted)]
    return FakeDetail(token, -0.5, ((token, -0.5), *others)[:wanted])


def fake_engine(
    model: FakeModel | None = None,
    *,
    policy: str = "dynamic",
    context: int = 1024,
    max_batch_size: int = 8,
    max_queue: int = 8,
    tokenizer: Any = None,
    pages: PagePool | None = None,
) -> LoadedEngine:
    """Return an engine whose loop runs on a fake model; stop it with `engine.manager.stop()`."""
    tokenizer = tokenizer or FakeTokenizer()

    def make_inference(prompt: str, num_tokens: int, prompt_ids: list[int], **options: Any) -> Inference:
        sampling = {k: options.pop(k) for k in SAMPLING & options.keys()}
        names = {"stop_texts", "stop_ids", "keep_stop", "min_tokens", "thinking"}
        written = {k: options.pop(k) for k in names & options.keys()}
        text = AnswerText(
            tokenizer,
            **written,
            eos_ids=() if sampling.get("ignore_eos", True) else tokenizer.eos_ids,
            hidden=tokenizer.special_ids if options.pop("hide_special", False) else (),
        )
        return Inference(prompt, num_tokens, prompt_ids, sampling=sampling, text=text, **options)

    manager = BatchingManager(
        model or FakeModel(),
        pages=pages,
        max_batch_size=max_batch_size,
        max_queue=max_queue,
        make_inference=make_inference,
    )
    manager.start(policies.get_policy(policy, max_batch_size=max_batch_size))
    wait_until(lambda: manager.is_alive)
    return LoadedEngine(
        manager=manager, make_inference=make_inference, model=manager.model, tokenizer=tokenizer, model_name="fake",
        device="cpu", dtype="float32", kv_dtype="float32", context=context,
        grammars=Grammars(tokenizer, tokenizer.vocab_size),
        vocabulary=tokenizer.vocab_size, width=4, n_pages=0, page_size=16, tokens_per_step=2048,
    )  # fmt: skip


def places_taken(app: Flask) -> int:
    """Return how many places of the queue the requests of an app hold."""
    taken: int = app.extensions["service"].engine.manager.inbox.places.taken
    return taken

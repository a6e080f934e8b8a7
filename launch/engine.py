"""Assemble an engine: a model, its pages, its tokenizer, a policy, and the loop that runs them.

Part of the composition root: it may import every package but `app`, and only `app.py`, tests and benchmarks import it.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import policies
from api.service import LoadedEngine
from batching import BatchingManager, Inference
from config import Config
from costs import mock
from generate.answer_key import answer_key
from launch import plugin
from launch.adapters import make_store
from launch.load_drafter import make_speculator
from launch.load_model import load_mock, load_model
from launch.pinning import pin
from observe.replay.question import Server
from observe.replay.recording import Recording
from observe.replay.what_if import WhatIf
from scheduling.pages import PagePool
from terminal.option_types import pieces

ENGINE_STACK = 8 << 20  # bytes


@contextmanager
def engine_stack() -> Iterator[None]:
    """Start threads with the usual stack of the system, as GPU drivers and Triton's compiler expect."""
    before = threading.stack_size(ENGINE_STACK)
    try:
        yield
    finally:
        threading.stack_size(before)


def load_engine(config: Config, on_death: Callable[[str], None] = lambda reason: None) -> LoadedEngine:
    """Load the configured model, allocate its pages, and start the loop.

    `on_death` is called with the reason when the loop fails.
    """
    from generate.grammar import Grammars

    armed = plugin.read(os.environ)
    armed.load()
    policy = policies.get_policy(config.policy, config.max_batch_size, config.policy_options)
    load = load_mock if mock.is_mock(config.model) else load_model
    parts = load(config, slots=config.max_batch_size)  # a policy that is switched to may use all of them
    pages = PagePool(
        parts.n_pages,
        parts.page_size,
        prefix_cache=config.prefix_cache,
        salt=f"{parts.model_name} {parts.dtype} {parts.quantize} {parts.kv_dtype}",
        evict=policies.get_eviction(config.evict),
        window=parts.window,
    )
    if config.pinned_prefixes:
        pin(config, parts, pages)
    make_inference = armed.maker(inference_maker(parts.tokenizer))
    manager = BatchingManager(
        armed.model(parts.model, parts.tokenizer.decode),
        pages=pages,
        max_batch_size=policy.max_batch_size,
        max_queue=config.max_queue,
        max_queue_tokens=config.max_queue_tokens,
        max_tokens_per_step=config.max_tokens_per_step or parts.tokens_per_step,
        speculator=make_speculator(config, parts),
        make_policy=policies.get_policy,
        make_inference=make_inference,
        on_death=on_death,
        dedup=None if config.dedup == "off" else answer_key,
    )
    other_names = tuple(dict.fromkeys(pieces(config.served_names)))
    adapters = make_store(config, parts.read_adapter, {parts.served_name, *other_names}, manager)
    recording = Recording(lambda: (active := manager.policy) is not None and active.padded)
    # Before the loop starts, whose thread reads these lists without a lock.
    manager.listeners.append(recording.on_arrival)
    manager.observers += [*armed.observers(), recording.observe]
    with engine_stack():
        manager.start(policy)
    cost = config.model if mock.is_mock(config.model) else ""
    server = Server(manager, recording, served=config.policy, slots=config.max_batch_size, cost=cost)
    return LoadedEngine(
        **vars(parts),
        manager=manager,
        make_inference=make_inference,
        other_names=other_names,
        special_end=config.end_of_text == "special",
        stall_seconds=armed.stall_seconds,
        what_if=WhatIf(server, parts.context),
        adapters=adapters,
        grammars=Grammars(parts.tokenizer, parts.vocabulary),
    )


def inference_maker(tokenizer: Any) -> Callable[..., Inference]:
    """Return a function that makes an Inference from a prompt and the parameters of a request."""
    from generate.constraint import Constraint
    from generate.params import SamplingParams
    from generate.text import AnswerText

    sampling_names = {f.name for f in dataclasses.fields(SamplingParams) if f.init}

    def make_inference(
        prompt: str,
        num_tokens: int,
        prompt_ids: list[int] | None = None,
        *,
        seed: int | None = None,
        stop_texts: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        ignore_eos: bool = True,
        keep_stop: bool = False,
        hide_special: bool = False,
        min_tokens: int = 0,
        thinking: Any = "none",
        **options: Any,
    ) -> Inference:
        params = {name: options.pop(name) for name in sampling_names & options.keys()}
        if params.get("grammar") is not None:
            params["grammar"] = Constraint(params["grammar"])  # of this answer alone
            ignore_eos = False  # nothing may follow a complete form
        eos_ids = () if ignore_eos else tokenizer.eos_ids
        return Inference(
            prompt,
            num_tokens,
            [*tokenizer.bos_ids, *tokenizer.encode(prompt)] if prompt_ids is None else prompt_ids,
            sampling=SamplingParams(
                seed=secrets.randbits(63) if seed is None else seed,
                min_tokens=min_tokens,
                banned_ids=frozenset(stop_ids) | {*eos_ids},
                **params,
            ),
            text=AnswerText(
                tokenizer,
                stop_texts,
                stop_ids,
                eos_ids=eos_ids,
                keep_stop=keep_stop,
                min_tokens=min_tokens,
                hidden=tokenizer.special_ids if hide_special else (),
                thinking=thinking,
            ),
            **options,
        )

    return make_inference

"""Assemble an engine: a model, its pages, its tokenizer, a policy, and the loop that runs them.

Part of the composition root: it may import every package but `app`, and only `app.py`, tests and benchmarks import it.
Torch is imported inside the functions that load a model with weights, because a mock model runs without torch.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import policies
from api.service import Engine, Tokenizer
from batching import BatchingManager, Inference, Model
from config import Config
from launch import faults
from models import catalog
from observe.question import Server
from observe.recording import Recording
from observe.shadow import Shadow
from observe.what_if import WhatIf
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.sequence import Sequence
from simulate import mock

if TYPE_CHECKING:
    from generate.runner import Runner
    from models.network import Network

ENGINE_STACK = 8 << 20  # bytes
RESOLVED = "EB_INTERNAL_RESOLVED"  # the launcher finds the model, its worker loads it


@dataclass(frozen=True)
class Parts:
    """The parts of an engine that depend on the kind of model; the first of its `n_pages` KV pages is for padding."""

    model: Model
    tokenizer: Tokenizer
    name: str
    device: str
    dtype: str
    quantize: str
    kv_dtype: str
    context: int
    vocabulary: int
    n_pages: int
    page_size: int
    tokens_per_step: int  # the default of --max-tokens-per-step
    sampling: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


@contextmanager
def engine_stack() -> Iterator[None]:
    """Start threads with the usual stack of the system, as GPU drivers and Triton's compiler expect."""
    before = threading.stack_size(ENGINE_STACK)
    try:
        yield
    finally:
        threading.stack_size(before)


def load_engine(config: Config, on_death: Callable[[str], None] = lambda reason: None) -> Engine:
    """Load the configured model, allocate its pages, and start the loop.

    `on_death` is called with the reason when the loop fails.
    """
    armed = faults.read(os.environ)
    armed.load()
    policy = policies.get_policy(config.policy, config.max_batch_size, config.policy_options)
    load = _load_mock if mock.is_mock(config.model) else _load_model
    parts = load(config, slots=config.max_batch_size)  # a policy that is switched to may use all of them
    pages = PagePool(
        parts.n_pages,
        parts.page_size,
        prefix_cache=config.prefix_cache,
        salt=f"{parts.name} {parts.dtype} {parts.quantize} {parts.kv_dtype}",
    )
    make_inference = armed.maker(inference_maker(parts.tokenizer))
    manager = BatchingManager(
        armed.model(parts.model, parts.tokenizer.decode),
        pages=pages,
        max_batch_size=policy.max_batch_size,
        max_queue=config.max_queue,
        max_queue_tokens=config.max_queue_tokens,
        max_tokens_per_step=config.max_tokens_per_step or parts.tokens_per_step,
        make_policy=policies.get_policy,
        make_inference=make_inference,
        on_death=on_death,
    )
    recording = Recording(lambda: manager.policy is not None and manager.policy.padded)
    manager.listeners.append(recording.on_arrival)
    manager.observers += [*armed.observers(), recording.observe]
    with engine_stack():
        manager.start(policy)
    cost = config.shadow_cost or (config.model if mock.is_mock(config.model) else "")  # a mock's is known
    server = Server(manager, recording, served=config.policy, slots=config.max_batch_size, cost=cost)
    return Engine(
        manager=manager,
        tokenizer=parts.tokenizer,
        make_inference=make_inference,
        model_name=parts.name,
        device=parts.device,
        dtype=parts.dtype,
        quantize=parts.quantize,
        kv_dtype=parts.kv_dtype,
        context=parts.context,
        page_size=parts.page_size,
        vocabulary=parts.vocabulary,
        sampling=parts.sampling,
        special_end=config.end_of_text == "special",
        stall_seconds=armed.stall_seconds,
        facts=parts.facts,
        shadow=Shadow(config.shadow, server) if config.shadow else None,
        what_if=WhatIf(server, parts.context),
    )


def _load_model(config: Config, slots: int) -> Parts:
    """Load a model with KV pages for the whole contexts of `slots` sequences, or as many as fit into memory.

    Where not one whole context fits, the context is cut to what does.
    """
    from generate import machine, quantize
    from generate.cpu.linear import linear_name
    from generate.cpu.prepare import prepare
    from models import sampling_defaults, weights
    from models.tokenizer import load_tokenizer

    text = os.environ.get(RESOLVED)
    resolved = (
        catalog.ResolvedModel.from_json(text) if text else catalog.resolve(config.model or None, config.load_format)
    )
    device = machine.choose_device(config.device)
    dtype = machine.choose_dtype(config.dtype, device, resolved.trained_dtype, config.quantize)
    if device.type == "cpu":
        prepare(dtype, config.quantize)
    quantize.check(config.quantize, dtype, device)
    kv_dtype = machine.choose_kv_dtype(config.kv_dtype, dtype, device)
    threads = machine.use_threads(config.compute_threads)
    tokenizer = load_tokenizer(resolved, config.tokenizer_file or None)
    sampling = sampling_defaults.read(resolved.path)
    model = weights.load(resolved, dtype, as_blocks=quantize.kept_kinds(config.quantize, resolved)).to(device)
    kinds = "+".join(quantize.kinds_of(model)).lower()
    linear = kinds if config.quantize == quantize.AS_STORED else linear_name(dtype, device, config.quantize)
    parameters = model.parameters
    shape = model.config
    n_pages = machine.kv_pages(shape, kv_dtype, device, config.kv_memory, slots)
    context = machine.longest_context(shape, n_pages, device)
    warnings = [resolved.warning, tokenizer.warning]
    if context < shape.block_size:
        warnings.append(machine.short_context_warning(shape, context, kv_dtype))
        model = model.shortened(context)
    runner = _make_runner(model, n_pages, slots, config)
    warm_up(runner)
    return Parts(
        model=runner,
        tokenizer=tokenizer,
        name=resolved.name + (" (random weights)" if resolved.load_format == "dummy" else ""),
        device=str(device),
        dtype=str(runner.dtype).removeprefix("torch."),
        quantize=config.quantize,
        kv_dtype=str(runner.keys.dtype).removeprefix("torch."),
        context=context,
        vocabulary=shape.vocab_size,
        n_pages=n_pages,
        page_size=runner.page_size,
        tokens_per_step=2048 if device.type == "cuda" else 256,
        sampling=sampling,
        facts={
            "parameters": parameters,
            "revision": resolved.revision,
            "attention": runner.attention,
            "linear": linear,
            "compute_threads": threads,
            "kv_bytes": runner.keys.nbytes * 2,
            "whole_context": shape.block_size,
            "warnings": [warning for warning in warnings if warning],
        },
    )


def _make_runner(model: Network, n_pages: int, slots: int, config: Config) -> Runner:
    """Return the runner that computes steps on the model's device."""
    from generate import machine
    from generate.runner import ModelRunner

    device = model.head.device
    if device.type != "cuda":
        kv_dtype = machine.choose_kv_dtype(config.kv_dtype, model.head.dtype, device)
        return ModelRunner(model, n_pages, machine.PAGE_SIZE, kv_dtype, config.quantize)
    from generate.gpu import runner as gpu

    any_format = config.dtype == "auto"
    size = machine.page_size(device)
    return gpu.make_runner(model, n_pages, size, slots, config.batch_invariant, any_format)


def warm_up(model: Model) -> None:
    """Compute a short prompt and two tokens in the page of padding, and discard them.

    The first step touches new memory and runs new code, which takes a hundred times as long as the second. No
    scheduler sees these steps, so no counter counts them.
    """
    from generate.params import SamplingParams

    seq = Sequence([0, 0], max_tokens=3, sampling=SamplingParams(), pages=[0])
    members, counts = [seq], [1]
    for number in range(-2, 1):  # the numbers of real steps begin at 1
        prompt = number == -2
        token = model.forward(Plan(number, 0.0, members, [seq.pending] if prompt else counts))[0]
        if not isinstance(token, int):  # the logits are not finite, which each request will report
            return
        seq.computed = seq.length
        seq.output_ids.append(token)


def _load_mock(config: Config, slots: int) -> Parts:
    """Load a mock model, which takes the time of a cost model and needs neither weights nor torch."""
    from models.tokenizer import load_stand_in

    tokenizer = load_stand_in(config.tokenizer_file or None, downloads=not config.demo)
    model = mock.load(config.model, ids=tokenizer.whole_texts())
    return Parts(
        model=model,
        tokenizer=tokenizer,
        name=model.name,
        device="none",
        dtype="none",
        quantize="none",
        kv_dtype="none",
        context=model.sizes.context,
        vocabulary=tokenizer.vocab_size,
        n_pages=mock.kv_pages(model.sizes, config.kv_memory, slots),
        page_size=mock.PAGE_SIZE,
        tokens_per_step=model.tokens_per_step,
        facts={"instead": model.description, "warnings": [tokenizer.warning] if tokenizer.warning else []},
    )


def inference_maker(tokenizer: Any) -> Callable[..., Inference]:
    """Return a function that makes an Inference from a prompt and the parameters of a request."""
    from generate.params import SamplingParams
    from generate.text import AnswerText

    sampling_names = {f.name for f in dataclasses.fields(SamplingParams) if f.init}

    def make_inference(
        prompt: str,
        num_tokens: int,
        prompt_ids: list[int] | None = None,
        *,
        seed: int | None = None,
        stops: Many[str] = (),
        stop_ids: Many[int] = (),
        ignore_eos: bool = True,
        keep_stop: bool = False,
        hide_special: bool = False,
        min_tokens: int = 0,
        **options: Any,
    ) -> Inference:
        params = {name: options.pop(name) for name in sampling_names & options.keys()}
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
                stops,
                stop_ids,
                eos_ids=eos_ids,
                keep_stop=keep_stop,
                min_tokens=min_tokens,
                hidden=tokenizer.special_ids if hide_special else (),
            ),
            **options,
        )

    return make_inference

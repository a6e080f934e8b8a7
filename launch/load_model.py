"""Load what an engine needs of a model: one with weights, or a mock model, which needs neither weights nor torch.

Part of the composition root. Torch is imported inside the functions that load a model with weights.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from api.service import Parts
from batching import Model
from config import Config
from costs import mock
from launch.adapters import reader
from launch.command import RESOLVED
from scheduling.iteration import Plan
from scheduling.sequence import Sequence

if TYPE_CHECKING:
    from generate.runner import Runner
    from models.network import Network
    from models.sources.resolved import ResolvedModel


def load_model(config: Config, slots: int) -> Parts:
    """Load a model with KV pages for the whole contexts of `slots` sequences, or as many as fit into memory.

    Where not even one whole context fits, the context is shortened to the pages there are.
    """
    from generate import machine, quantize
    from generate.cpu.linear import linear_name
    from models import sampling_defaults, weights
    from models.text.tokenizer import load_tokenizer

    resolved = _resolved(config)
    device = machine.choose_device(config.device)
    dtype = machine.choose_dtype(config.dtype, device, resolved.trained_dtype, config.quantize)
    if device.type == "cpu":
        machine.prepare(dtype, config.quantize)
    quantize.check(config.quantize, dtype, device)
    kv_dtype = machine.choose_kv_dtype(config.kv_dtype, dtype, device)
    threads = machine.use_threads(config.compute_threads)
    tokenizer = load_tokenizer(resolved, config.tokenizer_file or None)
    sampling = sampling_defaults.read(resolved.path)
    model = weights.load(resolved, dtype, as_blocks=quantize.kept_kinds(config.quantize, resolved)).to(device)
    linear = linear_name(dtype, device, config.quantize)
    if config.quantize == quantize.AS_STORED:
        linear = "+".join(quantize.kinds_of(model)).lower()
    shape, parameters = model.config, model.parameters  # of the whole context
    n_pages = machine.kv_pages(shape, kv_dtype, device, config.kv_memory, slots)
    context = machine.longest_context(shape, n_pages, device)
    warnings = [resolved.warning, tokenizer.warning]
    if context < shape.block_size:
        warnings.append(machine.short_context_warning(shape, context, kv_dtype))
        model = model.shortened(context)
    runner = make_runner(model, n_pages, slots, config)
    warm_up(runner)
    return Parts(
        model=runner,
        tokenizer=tokenizer,
        model_name=resolved.name + (" (random weights)" if resolved.load_format == "dummy" else ""),
        device=str(device),
        dtype=str(runner.dtype).removeprefix("torch."),
        quantize=config.quantize,
        kv_dtype=str(runner.keys.dtype).removeprefix("torch."),
        context=context,
        vocabulary=shape.vocab_size,
        width=shape.n_embd,
        n_pages=n_pages,
        page_size=runner.page_size,
        window=shape.memory,
        tokens_per_step=2048 if device.type == "cuda" else 256,
        sampling=sampling,
        facts={
            "parameters": parameters,
            "family": resolved.config.get("model_type"),
            "revision": resolved.revision,
            "attention": runner.attention,
            "linear": linear,
            "compute_threads": threads,
            "kv_bytes": runner.keys.nbytes * 2,
            "whole_context": shape.block_size,
            "warnings": [warning for warning in warnings if warning],
        },
        read_adapter=reader(resolved, runner.dtype, config) if device.type == "cpu" else None,
    )


def _resolved(config: Config) -> ResolvedModel:
    """Return the model that the launcher has found, or find it."""
    from models.sources.resolved import ResolvedModel

    if text := os.environ.get(RESOLVED):
        return ResolvedModel.from_json(text)
    from models.sources import catalog

    return catalog.resolve(config.model or None, config.load_format)


def make_runner(model: Network, n_pages: int, slots: int, config: Config) -> Runner:
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


def load_mock(config: Config, slots: int) -> Parts:
    """Load a mock model, which takes the time of a cost model and needs neither weights nor torch."""
    from models.text.tokenizer import load_stand_in

    tokenizer = load_stand_in(config.tokenizer_file or None, downloads=not (config.demo or config.lab))
    model = mock.load(config.model, ids=tokenizer.whole_texts())
    return Parts(
        model=model,
        tokenizer=tokenizer,
        model_name=model.name,
        device="none",
        dtype="none",
        kv_dtype="none",
        context=model.sizes.context,
        vocabulary=tokenizer.vocab_size,
        width=model.sizes.width,
        n_pages=mock.kv_pages(model.sizes, config.kv_memory, slots),
        page_size=mock.PAGE_SIZE,
        tokens_per_step=model.tokens_per_step,
        facts={"instead": model.description, "warnings": [tokenizer.warning] if tokenizer.warning else []},
    )

"""Load what an engine needs of a model: one with weights, or a mock model, which needs neither weights nor torch.

Part of the composition root. Torch is imported inside the functions that load a model with weights.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from logging.handlers import BufferingHandler
from typing import TYPE_CHECKING

from api.service import Parts
from batching import Model
from config import DEVICE_ERROR, RESOLVED, Config
from costs import mock
from launch import banner
from launch.adapters import reader
from observe import card as gauges
from scheduling.iteration import Plan
from scheduling.sequence import Sequence
from serving.recovery import is_out_of_memory
from terminal.progress import Stages

if TYPE_CHECKING:
    import torch

    from generate.runner import Runner
    from models.network import Network
    from models.sources.resolved import ResolvedModel
    from models.text.tokenizer import Tokenizer

# Shares of the usual pages and of the rows in a launch, tried in turn until a GPU's memory suffices.
SMALLER = ((1.0, 1.0), (0.5, 1.0), (0.25, 1.0), (0.25, 0.25), (0.1, 0.1))


def load_model(config: Config, slots: int) -> Parts:
    """Load a model with KV pages for the whole contexts of `slots` sequences, or as many as fit into memory.

    If not even one whole context fits, the context is shortened to the available pages. If a GPU lacks memory for what it
    needs besides the pages, it gets fewer pages, and then fewer rows in a launch, which take turns.
    """
    loading = Stages("loading PyTorch")
    with loading:
        import torch

        from generate import machine
        from generate.gpu import card

        for share, part in SMALLER:
            try:
                return _load(config, max(1, int(slots * part)), share, loading)
            except Exception as error:
                if not is_out_of_memory(error) or config.device == "cpu" or not torch.cuda.is_available():
                    raise
                reason = card.first_line(error)
            gc.collect()  # what was loaded is part of reference cycles
            torch.cuda.empty_cache()
    raise machine.MachineError(
        f"the GPU has too little memory: {reason}. Stop other programs that use it, or use a smaller --model"
    )


def _load(config: Config, slots: int, share: float, loading: Stages) -> Parts:
    """Load a model, with a share of the usual pages."""
    import torch

    from generate import machine, quantize
    from generate.cpu.linear import linear_name
    from models import sampling_defaults, weights

    resolved = _resolved(config)
    device = machine.choose_device(config.device)
    dtype = machine.choose_dtype(config.dtype, device, resolved.trained_dtype, config.quantize)
    remarks, on_gpu = _remarks(config, device, dtype), device.type == "cuda"
    compiling = [] if on_gpu else machine.prepare(dtype, config.quantize)
    if compiling:
        banner.note(f"compiling {len(compiling)} kernel{'s' * (len(compiling) > 1)} for this processor, once")
    loading.at("reading tokenizer and weights")
    quantize.check(config.quantize, dtype, device)
    kv_dtype = machine.choose_kv_dtype(config.kv_dtype, dtype, device)
    threads = machine.use_threads(config.compute_threads)
    tokenizer = tokenizer_of(config, resolved)
    sampling = sampling_defaults.read(resolved.path)
    model = weights.load(
        resolved, dtype, as_blocks=quantize.kept_kinds(config.quantize, resolved),
        progress=lambda done, total: loading.at("reading weights", lambda: done, total, "tensors"),
    ).to(device)  # fmt: skip
    if compiling:
        loading.at("compiling", lambda: sum(kernel.done() for kernel in compiling), len(compiling), "kernels")
    linear = linear_name(dtype, device, config.quantize)
    if config.quantize == quantize.AS_STORED:
        linear = "+".join(quantize.kinds_of(model)).lower()
    shape, parameters = model.config, model.parameters  # of the whole context
    kv_memory = config.kv_memory
    if share < 1:
        kv_memory = int((kv_memory or machine.free_memory(device) * machine.GPU_SHARE) * share)
        remarks.append(
            f"the GPU's memory ran out, so keys and values get {share:.0%} of their share, and a launch has at most {slots} "
            "requests. Stop other programs that use it, or lower --kv-memory or --max-batch-size"
        )
    n_pages = machine.kv_pages(shape, kv_dtype, device, kv_memory, slots)
    context = machine.longest_context(shape, n_pages, device)
    warnings = [resolved.warning, tokenizer.warning, *remarks]
    if context < shape.block_size:
        warnings.append(machine.short_context_warning(shape, context, kv_dtype))
        model = model.shortened(context)
    records, logger = BufferingHandler(100), logging.getLogger("generate.gpu")
    logger.addHandler(records)  # each part that falls back to plain PyTorch says why
    stage, count = ("preparing the GPU", 0) if on_gpu else ("packing weights", shape.n_layer)
    loading.at(stage, lambda: count - len(model.blocks), count, "layers")
    try:
        runner = make_runner(model, n_pages, slots, config)
    finally:
        logger.removeHandler(records)
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
        tokens_per_step=2048 if on_gpu else 256,
        sampling=sampling,
        facts={
            "parameters": parameters,
            "family": resolved.config.get("model_type"),
            "revision": resolved.revision,
            "attention": runner.attention,
            "kernels": getattr(runner, "kernels", {}),
            "gauges": gauges.reader(f"GPU-{torch.cuda.get_device_properties(device).uuid}") if on_gpu else dict,
            "fallbacks": [each.getMessage() for each in records.buffer if each.levelno >= logging.WARNING],
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


def _remarks(config: Config, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return why this start is slower, or has less memory, than it could, as far as that is known before loading."""
    from generate.gpu import card

    remarks = card.remarks(device, dtype) if device.type == "cuda" else []
    if device.type != "cuda" and config.device == "auto" and card.DRIVER.exists():
        remarks.append(f"there is an NVIDIA driver, but {card.problem()}. The CPU computes instead")
    if reason := os.environ.get(DEVICE_ERROR):
        remarks.append(
            f"the engine before failed: {reason}. This one has no fast kernels until the server is restarted"
        )
    return remarks


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


def warm_up(model: Model, rows: int = 1, steps: int = 2) -> float:
    """Compute short prompts and `steps` tokens of each in the page of padding, and discard them; return tokens/s.

    The first step touches new memory and runs new code, which takes a hundred times as long as the second. No
    scheduler sees these steps, so no counter counts them.
    """
    from generate.params import SamplingParams

    members = [Sequence([0, 0], steps + 1, sampling=SamplingParams(), pages=[0]) for _ in range(rows)]
    began = 0.0
    for number in range(-steps, 1):  # the numbers of real steps begin at 1
        began = time.perf_counter() if number <= 1 - steps else began
        outputs = model.forward(Plan(number, 0.0, members, [seq.pending for seq in members]))
        for seq, token in zip(members, outputs):
            if not isinstance(token, int):  # the logits are not finite, which each request will report
                return 0.0
            seq.computed = seq.length
            seq.output_ids.append(token)
    return rows * steps / (time.perf_counter() - began)


def tokenizer_of(config: Config, resolved: ResolvedModel | None = None) -> Tokenizer:
    """Load the tokenizer of the configured model, or what stands in for that of a mock model."""
    from models.text.tokenizer import load_stand_in, load_tokenizer

    if mock.is_mock(config.model):
        return load_stand_in(config.tokenizer_file or None, downloads=not (config.demo or config.lab))
    return load_tokenizer(resolved or _resolved(config), config.tokenizer_file or None)


def load_mock(config: Config, slots: int) -> Parts:
    """Load a mock model, which takes the time of a cost model and needs neither weights nor torch."""
    tokenizer = tokenizer_of(config)
    end = next(iter(tokenizer.eos_ids), None)
    model = mock.load(config.model, ids=tokenizer.whole_texts(), end=end, context=config.mock_context)
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

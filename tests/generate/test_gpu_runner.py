"""The GPU's runner gives the CPU's texts, whichever sequences join and leave, and however they are drawn."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from config import Config
from generate import machine
from generate.gpu import sampling
from generate.gpu.runner import GpuRunner, make_runner
from generate.params import GREEDY, SamplingParams
from generate.runner import ModelRunner
from launch import engine, load_model
from models.gpt2 import GPT, GPTConfig
from scheduling.sequence import Sequence
from tests.support import points
from tests.support.generate import SHAPES, make_model, multiply_in_one_order, ragged, run

CONFIG = SHAPES["heads of 64"]
DRAWS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "top-k and top-p": {"temperature": 0.9, "top_k": 20, "top_p": 0.8},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "penalty": {"temperature": 1.0, "repetition_penalty": 1.3},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
}


def gpu_runner(capacity: int = 8, strict: bool = False) -> GpuRunner:
    runner = GpuRunner(make_model(CONFIG), 120, 64, capacity=capacity, strict=strict)
    assert runner.warm_up()
    return runner


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("policy", points(1, "dynamic", "static"))
def test_texts_are_the_cpus_for_every_shape_of_model(shape: str, policy: str) -> None:
    config = SHAPES[shape]
    expected = run(make_model(config), ragged(config, 6, 1, temperature=0), policy, slots=4)
    runner = GpuRunner(make_model(config), 120, 64, capacity=8)
    assert run(None, ragged(config, 6, 1, temperature=0), policy, slots=4, runner=runner) == expected


def test_a_warm_runner_gives_the_texts_of_a_cold_one() -> None:
    expected = run(None, ragged(CONFIG, 6, 1), runner=gpu_runner())
    warm = gpu_runner()
    load_model.warm_up(warm)
    assert run(None, ragged(CONFIG, 6, 1), runner=warm) == expected


def mixed(n: int, seed: int) -> list[Sequence]:
    """Return requests of all kinds of drawing, some with log probabilities, some that stop early."""
    rng = random.Random(seed)
    requests = ragged(CONFIG, n, seed)
    for i, seq in enumerate(requests):
        logprobs = 2 if rng.random() < 0.15 else None
        seq.sampling = SamplingParams(**rng.choice([*DRAWS.values()]), seed=i, logprobs=logprobs)
        last = rng.randrange(CONFIG.vocab_size) % 7
        seq.stop = lambda token, last=last: "stop" if token % 7 == last else None
    return requests


@pytest.mark.parametrize(
    ("policy", "slots", "budget", "arrivals"),
    points(2, ("dynamic", 8, 24, 1), ("static", 6, 2048, 4), ("dynamic", 8, 2048, 3), ("dynamic", 20, 2048, 20),
           ("static-exact", 8, 2048, 8), ("dynamic", 3, 64, 30)),
)  # fmt: skip
def test_mixed_requests_get_the_cpus_texts_in_any_batch(policy: str, slots: int, budget: int, arrivals: int) -> None:
    options = {"slots": slots, "budget": budget, "arrivals": arrivals}
    expected = run(make_model(CONFIG), mixed(16, 4), policy, **options)
    assert run(None, mixed(16, 4), policy, runner=gpu_runner(), **options) == expected


def test_log_probabilities_are_the_cpus() -> None:
    def details(runner: ModelRunner) -> list[list[float]]:
        params = SamplingParams(temperature=0, logprobs=3, prompt_logprobs=3)
        requests = [Sequence([1, 2, 3 + i], 5, sampling=params) for i in range(3)]
        run(None, requests, runner=runner)
        return [[d.logprob for d in seq.prompt_details + seq.details] for seq in requests]

    expected = torch.tensor(details(ModelRunner(make_model(CONFIG), 120, 64)))
    assert expected.shape == (3, 7)
    assert (torch.tensor(details(gpu_runner())) - expected).abs().max() < 1e-4


def test_logits_that_overflow_are_found_at_the_warm_up() -> None:
    model = make_model(CONFIG)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * torch.inf, requires_grad=False)
    assert not GpuRunner(model, 4, 64).warm_up()


def test_a_model_with_values_too_large_for_float16_runs_in_bfloat16(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loud() -> GPT:
        model = make_model(CONFIG)
        mlp = model.transformer.h[0].mlp
        mlp.c_fc.bias.fill_(6e4)
        mlp.c_proj.weight.fill_(1.0)
        return model.half()

    runners: list[weakref.ref[GpuRunner]] = []
    init = GpuRunner.__init__

    def note(self: GpuRunner, *how: object) -> None:
        assert len(runners) != 1 or runners[0]() is None  # a card cannot hold the pages of two
        runners.append(weakref.ref(self))
        init(self, *how)  # type: ignore[arg-type]

    monkeypatch.setattr(GpuRunner, "__init__", note)
    assert make_runner(loud(), 4, 64, 2, strict=False, any_format=True).dtype == torch.bfloat16
    assert "using bfloat16" in caplog.text
    assert make_runner(loud(), 4, 64, 2, strict=False, any_format=False).dtype == torch.float16
    assert "not finite in torch.float16. Use another --dtype" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_serve(dtype: torch.dtype) -> None:
    runner = make_runner(make_model(CONFIG, dtype), 120, 64, 8, strict=False, any_format=False)
    texts = run(None, ragged(CONFIG, 6, 1, temperature=0), runner=runner)
    exact = run(make_model(CONFIG), ragged(CONFIG, 6, 1, temperature=0))
    assert [len(text) for text in texts] == [len(text) for text in exact]
    assert sum(text[0] == other[0] for text, other in zip(texts, exact)) > 3


def test_a_cards_pages_come_from_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda")
    monkeypatch.setattr(machine, "free_memory", lambda device: 10 << 30)
    page = machine.bytes_per_token(CONFIG.architecture, torch.float16) * machine.page_size(card)
    assert machine.kv_pages(CONFIG.architecture, torch.float16, card, 0, slots=1) == (8 << 30) // page + 1
    assert machine.kv_pages(CONFIG.architecture, torch.float16, card, 2 << 30, slots=1) == (2 << 30) // page + 1


def test_a_row_too_flat_for_the_device_is_drawn_by_the_host() -> None:
    def requests() -> list[Sequence]:
        flat = SamplingParams(temperature=50.0, top_p=0.97, seed=3)
        return [Sequence([1, 2, i], 12, sampling=flat) for i in range(3)]

    runner = gpu_runner()
    assert run(None, requests(), runner=runner) == run(make_model(CONFIG), requests())
    assert CONFIG.vocab_size > sampling.CANDIDATES
    assert runner.decoder.used_ahead == 0  # each step was repeated for the host


def test_more_sequences_than_rows_are_decoded_in_turns() -> None:
    expected = run(make_model(CONFIG), ragged(CONFIG, 20, 6), slots=20, arrivals=20)
    runner = gpu_runner(capacity=6)
    assert run(None, ragged(CONFIG, 20, 6), slots=20, arrivals=20, runner=runner) == expected


def test_a_step_has_at_least_two_rows() -> None:
    runner = gpu_runner(capacity=1)
    sizes: list[int] = []
    step = runner.decoder.replayer.step
    runner.decoder.replayer.step = lambda size, drawing: (sizes.append(size), step(size, drawing))[1]
    alone = [Sequence([3, 1, 4], 6, sampling=GREEDY)]
    expected = run(make_model(CONFIG), [Sequence([3, 1, 4], 6, sampling=GREEDY)])
    assert run(None, alone, "nobatch", runner=runner) == expected
    assert set(sizes) == {2}  # torch's products of one row are slower


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of rows of padding, which hold anything
@pytest.mark.full
def test_strict_logits_do_not_depend_on_the_batch_and_their_texts_are_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not there: pip install triton")
    multiply_in_one_order(monkeypatch)
    from generate.gpu.triton_attention import TritonDecode
    from generate.gpu.triton_prompts import TritonPrompts

    config = GPTConfig(block_size=128, vocab_size=61, n_layer=1, n_head=1, n_embd=64)
    runner = GpuRunner(make_model(config), 120, 64, capacity=4, strict=True)
    runner.attend = TritonDecode(4, 2, config.n_head, config.n_head, config.head_size, runner.device)
    runner.prefill.attend = TritonPrompts()
    seen: list[dict[tuple[str, int], torch.Tensor]] = []

    def watch(compute: Callable[..., Any], logits: int) -> Callable[..., Any]:
        def computed(sequences: list[Sequence], *args: Any) -> Any:
            result = compute(sequences, *args)
            seen[-1].update({(s.id, s.length): row.clone() for s, row in zip(sequences, result[logits])})
            return result

        return computed

    def texts(policy: str) -> list[list[int]]:
        seen.append({})
        asks = SamplingParams(temperature=0, logprobs=0)  # so that the host draws from the logits
        requests = [Sequence([9, 8, i] * 21, 3, id=str(i), sampling=asks) for i in range(2)]
        return run(None, requests, policy, runner=runner)

    monkeypatch.setattr(runner.decoder, "launch", watch(runner.decoder.launch, 1))
    monkeypatch.setattr(runner, "_compute_prompts", watch(runner._compute_prompts, 0))
    greedy = [Sequence([9, 8, i] * 21, 3, sampling=GREEDY) for i in range(2)]
    assert texts("dynamic") == texts("nobatch") == run(make_model(config), greedy)
    together, alone = seen
    assert len(alone) == 6
    assert together.keys() == alone.keys()
    assert all(torch.equal(row, alone[where]) for where, row in together.items())


def test_the_thread_that_computes_has_a_whole_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, int] = {}
    start = threading.Thread.start

    def note(thread: threading.Thread) -> None:
        sizes[thread.name] = threading.stack_size()  # which sets it to the system's
        threading.stack_size(sizes[thread.name])
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", note)
    before = threading.stack_size(512 * 1024)  # as launch/gunicorn_conf.py has it for handlers
    try:
        made = engine.load_engine(Config(policy="dynamic", model="mock:llm-mock"))
        made.manager.stop(1)
    finally:
        after = threading.stack_size(before)
    assert sizes["batching-loop"] == engine.ENGINE_STACK
    assert after == 512 * 1024


def test_the_settings_reach_the_gpus_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr("generate.gpu.runner.make_runner", lambda *how: asked.append(how))
    model = SimpleNamespace(head=SimpleNamespace(device=torch.device("cuda")))
    load_model.make_runner(model, 9, 32, Config(batch_invariant=True))  # type: ignore[arg-type]
    load_model.make_runner(model, 9, 32, Config(dtype="float16"))  # type: ignore[arg-type]
    assert asked == [(model, 9, 128, 32, True, True), (model, 9, 128, 32, False, False)]

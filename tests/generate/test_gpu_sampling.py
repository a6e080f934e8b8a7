"""Tokens drawn on the device are the host's, and every bucket of a decode step has its graph."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from generate.gpu import choose, sampling
from generate.gpu.graphs import BUCKETS, GraphReplayer, Replayer, buckets_up_to
from generate.params import SamplingParams
from generate.sampling import sample, uniform


def test_the_devices_uniforms_are_the_hosts_to_the_bit() -> None:
    seeds = [0, 1, 2**63 - 1, 2**64 - 1, 12345678901234567]
    positions = [0, 1, 7, 1000, 1023]
    keys = torch.tensor([sampling.key_of(seed) for seed in seeds])
    got = sampling.uniforms(keys, torch.tensor(positions)).tolist()
    assert got == [uniform(seed, position) for seed, position in zip(seeds, positions)]


def test_the_devices_draws_are_the_hosts() -> None:
    rng = random.Random(3)
    logits = 3 * torch.randn(400, 5000, generator=torch.Generator().manual_seed(3))
    params = [
        SamplingParams(temperature=rng.choice([0, 0.5, 1.0, 1.5]), top_k=rng.choice([0, 0, 1, 40, 256]),
                       top_p=rng.choice([1.0, 0.3, 0.9]), seed=i)
        for i in range(400)
    ]  # fmt: skip
    positions = list(range(400))
    keys = torch.tensor([sampling.key_of(p.seed) for p in params])
    inverse = torch.tensor([1 / p.temperature if p.temperature else 0.0 for p in params]).double()
    columns = (torch.tensor([p.top_k for p in params]), torch.tensor([p.top_p for p in params]).double())
    got = sampling.draw(logits, keys, torch.tensor(positions), inverse, *columns, "filtered").tolist()
    expected = sample(logits, params, positions)
    flat = [i for i, token in enumerate(got) if token == sampling.TOO_FLAT]
    assert 0 < len(flat) < 100
    assert all(params[i].top_p < 1 and not params[i].top_k for i in flat)
    assert [t for t in got if t >= 0] == [t for i, t in enumerate(expected) if i not in flat]


@pytest.mark.parametrize("vocabulary", [7, 256, 257, 5000, 50257])
def test_the_kernels_draw_what_pytorch_draws(vocabulary: int) -> None:
    """Triton's, in its interpreter: greedy rows, rows at temperatures from 0.2 to 2, and rows that are not finite."""
    pytest.importorskip("triton", reason="Triton is not there: pip install triton")
    from generate.gpu import triton_sampling

    rows = 64
    padded = 3 * torch.randn(rows, vocabulary + 47, generator=torch.Generator().manual_seed(vocabulary))
    logits = padded[:, :vocabulary]  # a head is wider than its vocabulary
    padded[:, vocabulary:] = 1e9
    logits[3, 5], logits[4, 2], logits[5], logits[6, 3:], logits[7] = torch.nan, torch.inf, -torch.inf, -torch.inf, 0
    keys = torch.tensor([sampling.key_of(2**64 - 1 - 7919 * i if i % 2 else i) for i in range(rows)])
    positions = 17 * torch.arange(rows)
    inverse = torch.tensor([0.0 if i % 8 == 1 else 1 / (0.2 + i % 7 * 0.3) for i in range(rows)]).double()
    expected = sampling.draw(logits, keys, positions, inverse, keys, inverse, "plain")
    got = sampling.draw(logits, keys, positions, inverse, keys, inverse, "plain", triton_sampling.draw)
    assert got.tolist() == expected.tolist()
    assert got[3:6].tolist() == [sampling.NOT_FINITE] * 3
    assert (got[inverse == 0] == logits[inverse == 0].argmax(1)).all()


def test_the_drawing_kernels_are_tried_at_the_start_against_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not there: pip install triton")
    from generate.gpu import triton_sampling

    cpu = torch.device("cpu")
    assert choose.make_draw(500, cpu) is None
    monkeypatch.setattr(choose, "agreed", lambda make, *_: make())
    fast, error, (first, second) = choose.make_draw(500, cpu)  # type: ignore[misc]
    assert (fast, error) == (triton_sampling.draw, 0)
    assert first().tolist() == second().tolist()
    monkeypatch.setattr(triton_sampling, "draw", lambda logits, *_: logits.argmax(1))
    assert choose.make_draw(500, cpu)[1] == 1  # type: ignore[index]


def test_buckets_end_at_the_capacity_and_hold_every_batch() -> None:
    assert buckets_up_to(2) == [2]
    assert buckets_up_to(20) == [2, 4, 8, 12, 16, 20]
    assert buckets_up_to(512) == [*BUCKETS]
    replayer = Replayer(lambda rows, drawing: torch.empty(0), buckets_up_to(100), sampling.DRAWINGS)
    assert [replayer.bucket(n) for n in (1, 3, 64, 65, 100)] == [2, 4, 64, 96, 100]


def test_a_graph_is_recorded_for_every_bucket_and_replayed_with_its_own_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, str]] = []
    recording: list[FakeGraph] = []

    class FakeGraph:
        def __init__(self) -> None:
            self.held: list[tuple[int, str]] = []

        def replay(self) -> None:
            launched.extend(self.held)

    @contextlib.contextmanager
    def graph(held: FakeGraph, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        recording.append(held)
        yield
        recording.pop()

    def step(rows: int, drawing: sampling.Drawing) -> torch.Tensor:
        (recording[-1].held if recording else launched).append((rows, drawing))
        return torch.tensor([rows, len(drawing)])

    cuda = {"CUDAGraph": FakeGraph, "graph": graph, "graph_pool_handle": lambda: "pool",
            "current_stream": lambda: SimpleNamespace(synchronize=lambda: None)}  # fmt: skip
    for name, fake in cuda.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    replayer = GraphReplayer(step, buckets_up_to(5), sampling.DRAWINGS)
    replayer.record()
    assert len(replayer.graphs) == 3 * 3  # buckets 2, 4 and 5, three ways to draw
    assert next(iter(replayer.graphs))[0] == 5
    launched.clear()
    assert replayer.run(replayer.bucket(3), "plain").tolist() == [4, 5]
    assert launched == [(4, "plain")]

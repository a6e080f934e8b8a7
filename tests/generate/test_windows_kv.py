"""A model all of whose layers have windows: pages before them are given back while a request runs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import policies
from generate.drafters.ngram import NgramDrafter
from generate.gpu.runner import GpuRunner
from generate.params import GREEDY
from generate.runner import ModelRunner, Runner
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from scheduling.speculation import Speculator
from tests.support import points
from tests.support.generate import ARCHITECTURES, NAN, random_network

CONFIG = ARCHITECTURES["mistral, a window of 20"]
PAGE_SIZE, PAGES = 16, 160

pytestmark = pytest.mark.usefixtures("kernels_or_plain")


def requests() -> list[Sequence]:
    """Return requests with prompts and answers of several windows; half of the prompts begin alike."""
    rng = random.Random(4)
    prompts = [[7, 8, 9] * 30 * (i % 2) + [rng.randrange(211) for _ in range(rng.randrange(1, 99))] for i in range(10)]
    return [Sequence(prompt, rng.randrange(1, 60), id=str(i), sampling=GREEDY) for i, prompt in enumerate(prompts)]


def serve(runner: Runner, window: int, pages: int = PAGES, cache: bool = True, **options: Any) -> tuple[list[Any], int]:
    """Return the answers and how many pages were used at most; without a cache, all that are free hold NaN."""
    speculator = Speculator(NgramDrafter(), 4) if options.pop("drafts", False) else None
    pool = PagePool(pages, PAGE_SIZE, prefix_cache=cache, window=window)
    policy = policies.get_policy(options.pop("policy", "dynamic"), 4, options)
    scheduler, sequences, most = Scheduler(policy, pool, 40, speculator=speculator), requests(), 0
    for seq in sequences:
        scheduler.add(seq)

    def forward(plan: Plan) -> Any:
        nonlocal most
        most = max(most, pool.used)
        owned = {page for seq in scheduler.running for page in seq.pages if page}
        free = [page for page in range(pages) if page not in owned]
        if not cache:
            runner.keys[:, free] = runner.values[:, free] = NAN
        return runner.forward(plan)

    while scheduler.step(forward, lambda: 0.0) is not None:
        pass
    assert pool.used == 0
    return [seq.output_ids for seq in sequences], most


@pytest.fixture(scope="module")
def expected() -> tuple[list[Any], int]:
    return serve(ModelRunner(random_network(CONFIG), PAGES, PAGE_SIZE), 0)


SERVED: list[dict[str, Any]] = [
    {"drafts": True, "cache": False}, {"pages": 21}, {}, {"cache": False}, {"policy": "chunked"}, {"policy": "static"},
    {"pages": 21, "cache": False},
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"),
    points(9, *((ModelRunner, each) for each in SERVED), *((GpuRunner, each) for each in SERVED)),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_no_token_changes_when_pages_before_the_window_are_given_back(
    kind: type[Runner], options: dict[str, Any], expected: tuple[list[Any], int]
) -> None:
    runner = kind(random_network(CONFIG), options.get("pages", PAGES), PAGE_SIZE)
    answers, most = serve(runner, CONFIG.memory, **options)
    assert answers == expected[0]
    assert most < expected[1]


def test_only_a_window_in_every_layer_lets_pages_go() -> None:
    assert CONFIG.memory == 20
    assert ARCHITECTURES["qwen2, a layer with a window"].memory == 0


def test_a_request_holds_the_pages_of_its_window_and_its_prefix_is_still_found() -> None:
    pool = PagePool(PAGES, PAGE_SIZE, window=CONFIG.memory)
    scheduler = Scheduler(policies.get_policy("dynamic", 2, {}), pool, 40)
    runner = ModelRunner(random_network(CONFIG, torch.bfloat16), PAGES, PAGE_SIZE)
    first, second = (Sequence([3, 5] * 80, 8, id=name, sampling=GREEDY) for name in "ab")
    scheduler.add(first)
    while first.finish_reason is None:
        scheduler.step(runner.forward, lambda: 0.0)
        assert sum(page > 0 for page in first.pages) <= 11 - max(0, (first.computed - 20) // 16 - 1)
    scheduler.add(second)
    while scheduler.step(runner.forward, lambda: 0.0) is not None:
        pass
    assert (second.cached, second.output_ids) == (144, first.output_ids)

"""Two pools: prompts in one, the tokens after the first in the other, and the transfer between them."""

from __future__ import annotations

import random

import pytest

import policies
from costs.cost import Affine, Transfer
from routing.routers import round_robin
from scheduling.scheduler import Scheduler
from simulate import workloads
from simulate.fleet.disaggregated import Disaggregated, ImportingPool
from tests.support.scheduling import make_scheduler
from tests.support.simulate import run_command, sequences

COST = Affine(token=0.001, context=0.0)


def pools(prefill: int, decode: int, transfer: Transfer, pages: int = 0) -> Disaggregated:
    def importing() -> Scheduler:
        return Scheduler(policies.get_policy("dynamic", max_batch_size=8), ImportingPool(pages, 16, prefix_cache=False))

    decoders = [importing() if pages else make_scheduler("dynamic", 8) for _ in range(decode)]
    prefills = [make_scheduler("dynamic", 8) for _ in range(prefill)]
    return Disaggregated(prefills, decoders, round_robin(random.Random(0)), transfer, COST)


@pytest.mark.parametrize("pages", [0, 100])
def test_one_request_takes_its_prompt_the_transfer_and_its_other_tokens(pages: int) -> None:
    fleet = pools(1, 1, Transfer(1000, 1e6), pages)
    run = fleet.run(sequences([(0.0, 100, 11)]), round_robin(random.Random(0)))
    assert run.ttft.tolist() == pytest.approx([0.1])
    assert run.latency.tolist() == pytest.approx([0.1 + 0.1 + 10 * 0.001])
    assert run.tokens.tolist() == [11]
    assert run.hit_rate == 0


def test_a_replica_sends_one_prompt_after_the_other() -> None:
    fleet = pools(1, 2, Transfer(10_000, 1e6))
    run = fleet.run(sequences([(0.0, 100, 2), (0.0, 100, 2)]), round_robin(random.Random(0)))
    first, second = sorted(run.latency)
    assert second - first == pytest.approx(1.0)


def test_a_request_for_one_token_is_not_sent_on() -> None:
    run = pools(1, 1, Transfer(10_000, 1.0)).run(sequences([(0.0, 100, 1)]), round_robin(random.Random(0)))
    assert run.latency.tolist() == pytest.approx([0.1])


def test_all_requests_get_all_their_tokens_and_no_decode_waits_for_a_prompt() -> None:
    rows = workloads.draw("orca", 4.0, 200, seed=2)
    fleet = pools(2, 2, Transfer(98_304, 12.5e9), 400)
    run = fleet.run(rows.arriving(), round_robin(random.Random(0)))
    assert run.tokens.tolist() == rows.output.tolist()
    assert max(run.gaps) < 0.05  # a transfer of 0.004 s at most, and no prompt of half a second
    assert all(not replica.scheduler.running for replica in fleet.replicas)


def test_pools_stand_beside_the_mixed_fleet_of_the_same_size(capsys: pytest.CaptureFixture[str]) -> None:
    told, words = run_command(capsys, "fleet", "dynamic", "--num", "200", "--rate", "20", "--router", "round-robin",
                              "--replicas", "4", "--prefill-replicas", "1", "2", "--kv-tokens", "65536")  # fmt: skip
    assert [row["pools"] for row in told["routers"]] == ["4 mixed", "1 + 3", "2 + 2"]
    assert len({row["mean_e2el_s"] for row in told["routers"]}) == 3
    assert all(len(line) <= 80 for line in words.splitlines())


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("dynamic --prefill-replicas 8", "at most 7"),
        ("static --prefill-replicas 2", "Use dynamic"),
        ("dynamic --transfer-gbps 3", "Use --prefill-replicas"),
        ("dynamic --prefill-replicas 2 --replicas 2..8 --autoscaler tokens", "Leave one out"),
    ],
)
def test_pools_that_cannot_be_are_named(more: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, words = run_command(capsys, "fleet", "--num", "20", *more.split(), code=2)
    assert named in words

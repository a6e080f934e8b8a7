"""A real server's runs, request by request: the VTC artifact's ten, replayed.

Llama-2-7B on an A10G under LightLLM's loop. Two overheads are fitted, on `FCFS overload-multi` and `FCFS real` only:
0.14 ms for each token that a step gives out, and 20 ms a prefill step. All else is the fit of the published profile.

`FCFS proportional` lies at saturation, where a step 1 % slower makes the latency several per cent longer, and where the
batch settles into a cycle of groups (8 and 11 of 19 rows in the server) that the first seconds decide. Its latency is off
by -14 %; other overheads that meet the fitted runs as well make that -9 or -55 %. Its steps were also 3.5 % slower than
those of `VTC proportional` in the same cycle, on the same machine.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from costs import published
from costs.cost import Host
from simulate import workloads
from simulate.simulator import Run, simulate
from tests.support import points
from tests.support.data import more_data, path_of
from tests.support.scheduling import make_scheduler

ORDERS, SUITES = ("VTC", "FCFS"), ("overload", "overload-multi", "poisson_short_long", "real")
RUNS = [
    *points(1, "VTC__proportional", "FCFS__proportional"),
    *more_data(*(f"{o}__{s}" for s in SUITES for o in ORDERS)),
]
TOKEN, PREFILL = 0.14e-3, 20e-3
PARTICULARS = {"pool": 10_000, "per_client": 32, "batch_max_tokens": 3072, "max_wait": 10}


@cache
def measured(name: str) -> dict[str, np.ndarray]:
    table = np.genfromtxt(path_of(f"vtc/{name}.csv"), delimiter=",", names=True)
    return {key: table[key] for key in table.dtype.names}


@cache
def replayed(name: str, fitted: bool = True) -> Run:
    policy = "lightllm+vtc" if name.startswith("VTC") else "lightllm"
    more = {"count_twice": True} if name.startswith("VTC") else {}
    scheduler = make_scheduler(policy, 1000, **PARTICULARS, **more)
    trace = workloads.read(path_of(f"vtc/{name}.csv")).sequences()
    for seq in trace:
        seq.prompt_ids = [0] * (len(seq.prompt_ids) + 1)  # the start of text
    cost = published.make("vtc-a10g", {"start": PREFILL} if fitted else {})
    return simulate(scheduler, trace, cost, Host(poll=0.01, alpha2=TOKEN if fitted else 0.0))


def errors(name: str, fitted: bool = True) -> tuple[float, float, float, float]:
    """Return the relative errors of span, mean and p99 latency, and the mean one per request."""
    run, real = replayed(name, fitted), measured(name)
    span = (real["req_time"] + real["request_latency"]).max() - real["req_time"].min()
    latency = real["request_latency"]
    return (
        run.makespan / span - 1,
        run.latency.mean() / latency.mean() - 1,
        np.percentile(run.latency, 99) / np.percentile(latency, 99) - 1,
        float(np.abs(run.latency / latency - 1).mean()),
    )


def service(name: str, simulated: bool) -> tuple[np.ndarray, float]:
    """Return each client's share while all are backlogged, and the largest gap between the first two's service.

    Until the first client's last arrival; a request's service, prompt + 2 x output, is spread evenly from its first
    token to its finish.
    """
    real = measured(name)
    arrival, client = real["req_time"], real["client"]
    if simulated:
        run = replayed(name)
        first, last = arrival + run.ttft, arrival + run.latency
    else:
        first, last = arrival + real["first_token_latency"], arrival + real["request_latency"]
    worth = real["prompt_len"] + 2 * real["output_len"]
    until = min(arrival[client == c].max() for c in np.unique(client))
    times = np.linspace(0, until, 400)
    done = np.clip((times[:, None] - first) / np.maximum(last - first, 1e-9), 0, 1) * worth
    totals = np.stack([done[:, client == c].sum(axis=1) for c in np.unique(client)], axis=1)
    gap = float((totals.max(axis=1) - totals.min(axis=1)).max())
    return totals[-1] / totals[-1].sum(), gap


@pytest.mark.parametrize("name", RUNS)
def test_the_makespan_of_each_run_is_met(name: str) -> None:
    assert abs(errors(name)[0]) <= 0.03, errors(name)


@pytest.mark.parametrize("name", RUNS)
def test_mean_and_p99_latency_are_met(name: str) -> None:
    _, mean, p99, _ = errors(name)
    bound = 0.15 if name == "FCFS__proportional" else 0.06
    assert abs(mean) <= bound, mean
    assert abs(p99) <= bound, p99


@pytest.mark.parametrize("name", more_data("FCFS__overload", "VTC__overload", "FCFS__real"))
@pytest.mark.full
def test_without_the_overheads_of_the_host_a_run_looks_too_fast(name: str) -> None:
    span, mean, _, _ = errors(name, fitted=False)
    assert span < errors(name)[0] - 0.03
    assert mean < errors(name)[1] - 0.08


@pytest.mark.parametrize("name", more_data("FCFS__overload", "VTC__overload", "FCFS__poisson_short_long"))
@pytest.mark.full
def test_the_shares_of_two_clients_are_met(name: str) -> None:
    ours, theirs = service(name, simulated=True)[0], service(name, simulated=False)[0]
    assert ours == pytest.approx(theirs, abs=0.02)
    assert abs(theirs[0] - theirs[1]) < 0.02 or np.argmax(ours) == np.argmax(theirs)


@pytest.mark.parametrize("name", more_data("VTC__overload", "VTC__overload-multi", "VTC__poisson_short_long"))
def test_the_largest_gap_in_service_under_vtc_is_that_of_the_server(name: str) -> None:
    ours, theirs = service(name, simulated=True)[1], service(name, simulated=False)[1]
    assert ours == pytest.approx(theirs, rel=0.3)


@pytest.mark.full
@pytest.mark.data
def test_vtc_is_fairer_than_fcfs_in_overload() -> None:
    assert service("VTC__overload", True)[1] < service("FCFS__overload", True)[1] / 5

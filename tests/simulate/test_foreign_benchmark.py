"""The benchmark of the fit: made-up servers, whose law is not of the fit's form."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.foreign import Case, judged, log_of, summary


def test_a_made_up_server_delays_first_tokens_when_it_is_overloaded() -> None:
    calm, busy = (log_of(Case(load=load, slots=4, requests=40)) for load in (0.3, 3.0))
    for log in (calm, busy):
        assert (log.at < log.first).all()
        assert (log.first <= log.last).all()
    assert np.mean(busy.first - busy.at) > 3 * np.mean(calm.first - calm.at)


def test_half_of_a_log_predicts_the_other_half() -> None:
    run = judged(Case(load=1.2, slots=8, requests=44))
    assert not run["doubts"]
    assert run["latency"]["error"] < 0.1
    assert summary([run], "latency")["coverage"] > 0


@pytest.mark.full
def test_a_wrong_scheduler_is_doubted() -> None:
    assert judged(Case(load=2.0, slots=8, requests=44, assumed="tgi"))["doubts"]

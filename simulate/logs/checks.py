"""What is wrong with the requests of a log, for all formats alike: a note that widens the intervals, or a refusal.

The widening factors are judgments of how much less a log tells with such a flaw.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from client.places import NAN
from simulate.logs.log import Log, Note, Request

FEWEST, FEW = 3, 20  # whole answers: fewer are refused; fewer make the intervals wider
SLACK = 1e-4  # seconds by which rounded times may contradict each other
SILENCE, BURSTS = 20, 12  # times as long as the median, and as the mean
BUSY, MOST = 8, 0.7  # times as many prompt tokens in as long a time; part of the requests that ever run at once
AT_ONCE = 0.003  # seconds between two requests whose order is not known; after twice as long an idle server has begun
SLOWEST = 5.0  # seconds per token at the median: more are milliseconds


def checked(
    requests: Sequence[Request], server: Mapping[str, Any] = {}, notes: Sequence[Note] = (), designed: bool = False
) -> Log:
    """Return the log of the requests that ran, in order of arrival, on one clock; ValueError if too few are usable.

    Those without a whole answer are load, but not measured: their times are NaN. The arrivals of a `designed` load may pause.
    """
    # Of two clocks: the scheduler sees a request soonest when it idles, so the least difference is that of the clocks.
    offset = min((r.queued - r.sent for r in requests if math.isfinite(r.queued - r.sent)), default=0.0)
    arrived = [r._replace(sent=r.sent + offset if math.isfinite(r.sent) else r.queued) for r in requests]
    problems = Counter(filter(None, map(_problem, arrived)))
    if 2 * problems.total() > len(arrived):
        what = ", ".join(f"{n} {problem}" for problem, n in problems.items())
        raise ValueError(f"of its {len(arrived)} requests, {what}. Record a log with arrivals, token counts and times")
    ran = sorted((_measured(r) for r in arrived if not _problem(r)), key=lambda r: r.sent)
    whole = sum(math.isfinite(r.last) for r in ran)
    if whole < FEWEST:
        raise ValueError(f"its whole answers are {whole}, but a fit needs {FEWEST}, better 100. Record more requests")
    ran = _begun(ran) if designed else ran
    if not designed:
        _check_clocks(ran)
    lost = [Note(f"Requests that {why}: {n}. They are left out.", 1 + n / len(arrived)) for why, n in problems.items()]
    found = [*notes, *lost, *_flaws(ran, whole, designed)]
    if math.isfinite(begin := _begin(ran)):
        found += [Note(f"The log begins in a busy server: it counts from {begin - ran[0].sent:.3g} s on.", 1.5)]
        early = [r._replace(sent=r.first, first=NAN, last=NAN) for r in ran if r.first <= begin]  # which are only load
        ran = [*early, *(r._replace(sent=max(r.sent, begin)) for r in ran if not r.first <= begin)]
        ran.sort(key=lambda r: r.sent)
    return Log.of(ran, server, found)


def _begun(ran: Sequence[Request]) -> list[Request]:
    """Return requests that were sent at once in the order in which the server began them, which only first tokens tell.

    Those whose first token came half a step later than that of the others, or more, had missed the step of these.
    """
    sent, first, pace = np.array([(r.sent, r.first, (r.last - r.first) / max(1, r.output - 1)) for r in ran]).T
    begins = np.diff(sent, prepend=-math.inf) > AT_ONCE
    heads = sent[begins][np.cumsum(begins) - 1]
    soonest = np.array([np.fmin.reduce(first[heads == head]) for head in heads])
    late = np.isfinite(soonest) & ~(first <= soonest + np.nanmedian(pace) / 2)
    moved = heads + 2 * AT_ONCE * late
    return [ran[i]._replace(sent=float(moved[i])) for i in np.lexsort((first, moved))]


def _begin(ran: Sequence[Request]) -> float:
    """Return from when on a log that begins beside unknown requests has the server to itself; NaN for another log."""
    rows = [(r.sent, r.first, r.last, r.prompt, (r.last - r.first) / max(1, r.output - 1)) for r in ran]
    sent, first, last, prompt, pace = np.array(rows).T
    if not len(timed := np.sort(first[np.isfinite(first)])):
        return NAN
    silence, step = timed[0] - sent[0], np.nanmedian(pace)
    most = max(prompt[(first >= at) & (first <= at + silence)].sum() for at in timed)
    # Beside others, no token comes for a time in which the server can compute far more prompts than it does.
    if silence < SILENCE * step or most < BUSY * prompt[first <= timed[0] + step].sum():
        return NAN
    running = np.array([(first <= at).sum() - (last <= at).sum() for at in timed])
    return float(min([timed[running >= MOST * running.max()][0], *sent[1:][sent[1:] > np.fmax.accumulate(last)[:-1]]]))


def _problem(r: Request) -> str:
    """Return why a request cannot be served again, "" if it can."""
    if not math.isfinite(r.sent):
        return "have no arrival time"
    if not r.prompt or not (r.output or r.chunks):
        return "failed before the first token" if r.error else "have no token counts"
    contradicts = r.first < r.sent - SLACK or r.last < max(r.sent, r.first) - SLACK
    return "have times that contradict each other" if contradicts else ""


def _check_clocks(ran: Sequence[Request]) -> None:
    """Raise ValueError if times are not in seconds, or arrivals are by a clock that is far behind."""
    sent, first, last, output = (
        np.array([getattr(r, name) for r in ran]) for name in ("sent", "first", "last", "output")
    )
    timed = np.isfinite(first) & np.isfinite(last)
    if (several := timed & (output > 1)).any():
        pace = float(np.median((last - first)[several] / (output - 1)[several]))
        if pace > SLOWEST:
            raise ValueError(
                f"a token takes {pace:,.1f} s (median), but must take at most {SLOWEST:g} s. Write all times in seconds"
            )
    if timed.any() and (wait := float((first - sent)[timed].min())) > max(
        SLOWEST, float(np.ptp([*first[timed], *last[timed]]))
    ):
        raise ValueError(
            f"each first token comes at least {wait:,.0f} s after its arrival, which is longer than the server ran. "
            "Record arrivals and tokens by one clock"
        )


def _measured(r: Request) -> Request:
    """Count the chunks where there is no number of tokens; drop the times of a cut answer, and chunks that contradict it."""
    counts = r.counts or [1] * len(r.chunks)
    r = r._replace(output=r.output or sum(counts) or len(r.chunks), counts=counts)
    cut = bool(r.error) or not math.isfinite(r.last)
    rising = all(a <= b for a, b in zip([r.first, *r.chunks], [*r.chunks, r.last + SLACK]))
    if cut or not rising or len(counts) != len(r.chunks) or sum(counts) != r.output:
        r = r._replace(chunks=(), counts=())
    return r._replace(first=NAN, last=NAN) if cut else r


def _flaws(ran: Sequence[Request], whole: int, designed: bool) -> Iterator[Note]:
    sent, first, last = (np.array(times) for times in zip(*((r.sent, r.first, r.last) for r in ran)))
    if whole < FEW:
        yield Note(f"Whole answers: only {whole}, which tell little.", math.sqrt(FEW / whole))
    if cut := len(ran) - whole:
        yield Note(f"Cut or failed answers: {cut}. They count as load, but are not fitted.", 1 + cut / len(ran))
    if not np.isfinite(first).any():
        yield Note("There are no times of first tokens, so that waiting and computing prompts are not told apart.", 2.0)
    if np.ptp(sent) <= 0.01 * (np.nanmax(last) - sent[0]):
        yield Note("All requests arrived at once: their order decides who waits, and an idle server was not seen.", 1.5)
    usual, reach = np.diff(sent)[np.diff(sent) > 0], np.fmax.accumulate(last)[:-1]
    pause = np.diff(sent)[reach >= sent[1:]].max(initial=0.0)  # while something ran
    rest = (usual.sum() - pause) / max(1, len(usual) - 1)  # the mean of the others: bursts make their median small
    if not designed and len(usual) and pause > max(SILENCE * np.median(usual), BURSTS * rest):
        yield Note(f"No request arrived for {pause:.3g} s while others ran: a pause, or missing lines.", 1.25)

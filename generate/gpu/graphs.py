"""A step for a bucket of rows, recorded once and replayed: hundreds of launches become one.

The step is recorded where there is a GPU. Elsewhere it runs at once, with the same buckets, so that tests see the same
rows. It must not know what the step computes.
"""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from generate.gpu import card

log = logging.getLogger(__name__)

# No bucket of one row: for one row torch adds biases and computes GELU in separate kernels, a hundred more in a step of
# gpt2-medium. From two rows on they are parts of the product.
BUCKETS = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
Step = Callable[..., Tensor]  # rows, and a value of each choice: what the step computes


def buckets_up_to(capacity: int) -> list[int]:
    """Return the bucket sizes; the last is `capacity`, two or more."""
    return [size for size in BUCKETS if size < capacity] + [capacity]


class Replayer:
    """Run `step(rows, *values)` for buckets of rows, in ascending order, and all values of each choice."""

    def __init__(self, step: Step, buckets: Sequence[int], *choices: Sequence[str]) -> None:
        self.step, self.buckets, self.choices = step, buckets, choices

    def bucket(self, rows: int) -> int:
        """Return the smallest bucket that holds `rows` rows."""
        return self.buckets[bisect.bisect_left(self.buckets, rows)]

    def record(self) -> None:
        """Prepare every bucket, before the first request."""

    def run(self, rows: int, *values: str) -> Tensor:
        """Run a step of bucket size `rows`; return its result, valid until the next step."""
        return self.step(rows, *values)


class GraphReplayer(Replayer):
    """CUDA graphs of every case, largest first, in one pool of memory.

    Each graph keeps its own result, so that a later recording cannot reuse its memory.
    """

    def __init__(self, step: Step, buckets: Sequence[int], *choices: Sequence[str]) -> None:
        super().__init__(step, buckets, *choices)
        self.graphs: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def record(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        for case in itertools.product(reversed(self.buckets), *self.choices):
            for _ in range(2):  # compiles kernels and allocates the libraries' workspaces outside of the graph
                self.step(*case)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # thread_local: calls of other threads to the device meanwhile do not break the recording
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                result = self.step(*case)
            self.graphs[case] = graph, result

    def run(self, rows: int, *values: str) -> Tensor:
        case = rows, *values
        graph, result = self.graphs[case]
        graph.replay()
        return result


def recorded(replayer: Replayer, steps: str) -> Replayer:
    """Return the replayer after `record`, or one without graphs and a warning about these `steps`."""
    try:
        replayer.record()
    except RuntimeError as error:
        card.raise_if_lost(error)
        log.warning("%s run without CUDA graphs, which is slower: %s", steps, card.first_line(error))
        return Replayer(replayer.step, replayer.buckets, *replayer.choices)
    return replayer

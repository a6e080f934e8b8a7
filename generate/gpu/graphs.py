"""The decode step for a bucket of rows, recorded once and replayed: a thousand launches become one.

The step is recorded where there is a GPU. Elsewhere it runs at once, with the same buckets, so that tests see the same
rows. It must not know what the step computes.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from generate.gpu.sampling import DRAWINGS, Drawing

# No bucket of one row: for one row torch adds biases and computes GELU in separate kernels, a hundred more in a step of
# gpt2-medium. From two rows on they are parts of the product.
BUCKETS = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
Step = Callable[[int, Drawing], Tensor]  # rows, drawing: logits


def buckets_up_to(capacity: int) -> list[int]:
    """Return the bucket sizes; the last is `capacity`, two or more."""
    return [size for size in BUCKETS if size < capacity] + [capacity]


class Replayer:
    """Run `step(rows, drawing)` for buckets of rows."""

    name = "launched"

    def __init__(self, step: Step, capacity: int) -> None:
        self.step = step
        self.buckets = buckets_up_to(capacity)

    def bucket(self, rows: int) -> int:
        """Return the smallest bucket that holds `rows` rows."""
        return self.buckets[bisect.bisect_left(self.buckets, rows)]

    def record(self) -> None:
        """Prepare every bucket, before the first request."""

    def run(self, rows: int, drawing: Drawing) -> Tensor:
        """Run a step of bucket size `rows`; return its logits, valid until the next step."""
        return self.step(rows, drawing)


class GraphReplayer(Replayer):
    """CUDA graphs of every bucket and drawing, largest first, in one pool of memory.

    Each graph keeps its own logits, so that a later recording cannot reuse their memory.
    """

    name = "graphs"

    def __init__(self, step: Step, capacity: int) -> None:
        super().__init__(step, capacity)
        self.graphs: dict[tuple[int, Drawing], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def record(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        for case in self._cases():
            for _ in range(2):  # compiles kernels and allocates the libraries' workspaces outside of the graph
                self.step(*case)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # thread_local: calls of other threads to the device meanwhile do not break the recording
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                logits = self.step(*case)
            self.graphs[case] = graph, logits

    def _cases(self) -> Iterable[tuple[int, Drawing]]:
        return ((rows, drawing) for rows in reversed(self.buckets) for drawing in DRAWINGS)

    def run(self, rows: int, drawing: Drawing) -> Tensor:
        graph, logits = self.graphs[rows, drawing]
        graph.replay()
        return logits

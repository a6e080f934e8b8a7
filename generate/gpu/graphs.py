"""The decode step for a bucket of rows, recorded once and replayed: a thousand launches become one.

Recorded where there is a GPU; elsewhere the same step runs at once, with the same buckets, so that tests see what a
graph would. It must not know what the step computes.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from generate.gpu.sampling import DRAWINGS, Drawing

# None of one row: there torch adds a bias by a kernel of its own before each product, and computes GELU by another
# behind it, a hundred more in a step of gpt2-medium. From two rows on they are parts of the product.
BUCKETS = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
Step = Callable[[int, Drawing], Tensor]  # rows, drawing: logits


def buckets_up_to(capacity: int) -> list[int]:
    """Return the numbers of rows that steps are made for; the last is `capacity`, two or more."""
    return [size for size in BUCKETS if size < capacity] + [capacity]


class Replayer:
    """Runs `step(rows, drawing)` for a bucket of rows at least as large as asked for."""

    def __init__(self, step: Step, capacity: int) -> None:
        self.step = step
        self.buckets = buckets_up_to(capacity)

    def bucket(self, rows: int) -> int:
        """Return the smallest bucket for so many rows."""
        return self.buckets[bisect.bisect_left(self.buckets, rows)]

    def record(self) -> None:
        """Make ready every bucket, before the first request."""

    def run(self, rows: int, drawing: Drawing) -> Tensor:
        """Run a step of bucket size `rows`; return its logits, good until the next one."""
        return self.step(rows, drawing)


class GraphReplayer(Replayer):
    """CUDA graphs of every bucket and drawing, largest first, in one pool of memory.

    Each graph keeps its own logits, so that a later recording cannot take their place.
    """

    def __init__(self, step: Step, capacity: int) -> None:
        super().__init__(step, capacity)
        self.graphs: dict[tuple[int, Drawing], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def record(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        for case in self._cases():
            for _ in range(2):  # compiles kernels and lets libraries take their workspaces, outside of the graph
                self.step(*case)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # thread_local: what other threads do to the device meanwhile does not break the recording
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                logits = self.step(*case)
            self.graphs[case] = graph, logits

    def _cases(self) -> Iterable[tuple[int, Drawing]]:
        return ((rows, drawing) for rows in reversed(self.buckets) for drawing in DRAWINGS)

    def run(self, rows: int, drawing: Drawing) -> Tensor:
        graph, logits = self.graphs[rows, drawing]
        graph.replay()
        return logits


def make_replayer(step: Step, capacity: int, device: torch.device) -> Replayer:
    """Return graphs where there is a GPU, else the step itself."""
    kind = GraphReplayer if device.type == "cuda" else Replayer
    return kind(step, capacity)

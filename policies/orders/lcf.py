"""Least counter first: `vtc` without the lift, so that a returning client is favored until it has caught up.

It shows what the lift is for (Sheng et al., OSDI 2024).
"""

from __future__ import annotations

from dataclasses import replace

from policies.orders import vtc


class Order(vtc.Order):
    lifts = False

    def __init__(self, max_batch_size: int, **options: object) -> None:
        super().__init__(max_batch_size, **options)
        self.claims = replace(self.claims, fair=False)

"""Least counter first: `vtc` without the lift, so that a returning client is favored until it has caught up.

It shows what the lift is for (Sheng et al., OSDI 2024).
"""

from policies.orders import vtc


class Order(vtc.Order):
    lifts = False

    def __init__(self) -> None:
        self.claims = self.claims.but(fair=False)

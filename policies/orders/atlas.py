"""Adaptive thread-level attained service (Autellix, arXiv 2502.13965): as `plas`, but only the longest path counts.

For programs with parallel calls. Calls do not name their parents, so each begins with the longest path of its program that
had ended when it arrived. Where calls follow one another, this is `plas`.
"""

from policies.orders import plas


class Order(plas.Order):
    def credit(self, account: float, before: float, service: float) -> float:
        return max(account, before + service)

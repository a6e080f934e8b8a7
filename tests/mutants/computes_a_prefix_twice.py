"""Planted fault: requests join although another computes the prefix that they share."""

from policies.orders import prefix_tree


class Order(prefix_tree.Order):
    def _first_to_compute(self, seq):
        return None

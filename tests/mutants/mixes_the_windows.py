"""Planted fault: the tree of one window is walked together with those of the next ones."""

from policies.orders import prefix_tree


class Order(prefix_tree.Order):
    def _walk(self, window):
        return super()._walk(window + 9)

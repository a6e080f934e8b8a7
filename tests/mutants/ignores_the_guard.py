"""Planted fault: shortest first, however long the oldest has waited."""

from policies.orders import sjf


class Order(sjf.Order):
    def is_overdue(self, seq, now):
        return False

"""Planted fault: VTC that charges for a prompt twice."""

from policies.orders import vtc


class Order(vtc.Order):
    def on_admit(self, seq, now):
        super().on_admit(seq, now)
        self.charge(seq.client, self.price_of_joining(seq))

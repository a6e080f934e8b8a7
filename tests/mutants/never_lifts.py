"""Planted fault: VTC that lets clients save up what they do not use."""

from policies.orders import vtc


class Order(vtc.Order):
    lifts = False

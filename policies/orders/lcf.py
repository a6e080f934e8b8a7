"""Least counter first: `vtc` without the lift, so that a client which returns is favoured until it has caught up.

It is here to show what the lift is for (Sheng et al., OSDI 2024).
"""

from policies.orders import vtc


class Order(vtc.Order):
    fair = False
    lifts = False

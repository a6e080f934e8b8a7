"""First come, first served: by arrival, the order of every loop by default."""

from scheduling import policy


class Order(policy.Policy):
    """The default order."""

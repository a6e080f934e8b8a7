"""First come, first served: by arrival, which every loop does by itself."""

from scheduling import policy


class Order(policy.Policy):
    """The default order."""

"""No batching: one request at a time, in order of arrival, from its prompt to its last token.

It is static batching with one slot.
"""

from policies import static


class Policy(static.Policy):
    def __init__(self) -> None:
        self.max_batch_size = 1

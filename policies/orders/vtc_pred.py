"""VTC that charges ahead: what a request is predicted to be given is on its client's account when it joins.

Tokens beyond the prediction are charged as they come; what was charged and not given is paid back at the finish. The
better the prediction, the smaller the gap between clients (Sheng et al., OSDI 2024, section 4.4: the mean of the
client's last five, or exact, or exact but for an error).
"""

from __future__ import annotations

from policies.orders import vtc
from policies.orders._predictions import Predicting
from scheduling.options import Option, options_of
from scheduling.sequence import Sequence

KNOWN = options_of(Predicting)["predictor"]


class Order(Predicting, vtc.Order):
    predictor = Option("mean", KNOWN.help, choices=KNOWN.choices)  # type: ignore[assignment]
    fair = False  # as good as its predictions are
    count_twice = False

    def __init__(self, max_batch_size: int, **options: object) -> None:
        super().__init__(max_batch_size, **options)
        self._ahead: dict[Sequence, float] = {}  # tokens that are paid for and not given yet

    def price_of_joining(self, seq: Sequence) -> float:
        return super().price_of_joining(seq) + self.w_q * self.predict(seq)

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        if not seq.displaced:
            self._ahead[seq] = self.predict(seq)

    def on_token(self, seq: Sequence, now: float) -> None:
        ahead = self._ahead.get(seq, 0.0)
        paid = min(1.0, ahead)
        self._ahead[seq] = ahead - paid
        self.charge(seq.client, self.w_q * (1.0 - paid))

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        self.charge(seq.client, -self.w_q * self._ahead.pop(seq, 0.0))

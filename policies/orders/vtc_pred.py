"""VTC that charges in advance: a client pays the predicted cost of a request when it joins.

Tokens beyond the prediction are charged as they come, and unused ones are refunded at the end. Better predictions make
the gap between clients smaller (Sheng et al., OSDI 2024, section 4.4). The paper's three are the mean of the client's
last five (`predictor=mean`), exact (`oracle`), and exact within 50 % (`uniform`, `error=0.5`).
"""

from policies.orders import vtc
from policies.orders._predictions import Predicting
from scheduling.options import Option, options_of
from scheduling.sequence import Sequence

KNOWN = options_of(Predicting)["predictor"]


class Order(Predicting, vtc.Order):
    predictor = Option("mean", KNOWN.help, choices=KNOWN.choices)  # type: ignore[assignment]
    count_twice = False

    def __init__(self) -> None:
        # It is as fair as its predictions are right, and lengths only change what a client pays.
        self.claims = self.claims.but(fair=False, uses=("client",))
        self._ahead: dict[Sequence, float] = {}  # tokens that were charged at admission

    def price_of_joining(self, seq: Sequence) -> float:
        return self.price(len(seq.prompt_ids), self.predict(seq))

    def on_admit(self, seq: Sequence, now: float) -> None:
        super().on_admit(seq, now)
        if not seq.preemptions:
            self._ahead[seq] = self.predict(seq)

    def on_token(self, seq: Sequence, now: float) -> None:
        ahead, number = self._ahead.get(seq, 0.0), len(seq.output_ids)
        if number > ahead:
            self._charge_between(seq, max(ahead, number - seq.new_tokens), number)

    def on_finish(self, seq: Sequence, now: float) -> None:
        super().on_finish(seq, now)
        ahead, number = self._ahead.pop(seq, 0.0), len(seq.output_ids)
        if number < ahead:
            self._charge_between(seq, ahead, number)

    def _charge_between(self, seq: Sequence, paid: float, due: float) -> None:
        """Charge for `due` tokens instead of the `paid` ones; fewer of them are a refund."""
        prompt = len(seq.prompt_ids)
        self.charge(seq.client, self.price(prompt, due) - self.price(prompt, paid))

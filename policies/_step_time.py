"""How long a step takes by its prompt tokens, decoding rows and their contexts, learned from the steps that were computed.

It is a sum of five effects, by recursive least squares that forget. Files whose names begin with an underscore are shared by
several policies.
"""

from math import inf

from scheduling.iteration import Plan

# Of a step, a step with a prompt, prompt tokens, rows and tokens of context: so that their effects are of similar size.
UNITS = (1.0, 1.0, 256.0, 16.0, 4096.0)
PRIOR = 1e4  # variance of each effect before any step, that of a step's noise being 1
FORGET, MOST = 0.998, 400.0  # weight of the step before; total variance above which nothing is forgotten
FITTED = 16  # steps after which it counts as known
OUTLYING = 4.0  # times the expected seconds: a longer step counts as one of these then


class StepTime:
    """Seconds by what a step computes."""

    def __init__(self) -> None:
        self.steps = 0
        self._effects = [0.0] * len(UNITS)
        self._variances = [[PRIOR * (i == j) for j in range(len(UNITS))] for i in range(len(UNITS))]

    def learn(self, prompt: int, rows: int, context: int, seconds: float) -> None:
        """Note that a step took so long; a clock that stood still says nothing."""
        if seconds <= 0:
            return
        expected, self.steps = self.seconds(prompt, rows, context), self.steps + 1
        if self.steps > FITTED and expected > 0:
            seconds = min(seconds, OUTLYING * expected)
        x = _scaled(prompt, rows, context)
        along = [sum([v * each for v, each in zip(row, x)]) for row in self._variances]
        gain = 1 / (1 + sum([each * a for each, a in zip(x, along)]))
        error = seconds - sum([e * each for e, each in zip(self._effects, x)])
        self._effects = [e + gain * error * a for e, a in zip(self._effects, along)]
        total = sum([self._variances[i][i] for i in range(len(UNITS))])
        keep = FORGET if total < MOST else 1.0
        self._variances = [
            [(v - gain * a * b) / keep for v, b in zip(row, along)] for row, a in zip(self._variances, along)
        ]

    def seconds(self, prompt: int, rows: int, context: int) -> float:
        """Return how long a step is expected to take."""
        return max(0.0, sum([effect * each for effect, each in zip(self._effects, _scaled(prompt, rows, context))]))

    def prompt_tokens(self, seconds: float) -> float:
        """Return how many prompt tokens add so many seconds to a step; infinity if they seem to cost nothing."""
        start, each = self._effects[1], self._effects[2] / UNITS[2]
        return (seconds - start) / each if each > 0 else inf


def _scaled(prompt: int, rows: int, context: int) -> list[float]:
    return [each / unit for each, unit in zip((1, bool(prompt), prompt, rows, context), UNITS)]


def computed(plan: Plan) -> tuple[int, int, int]:
    """Return the prompt tokens, the other rows and their contexts of a step whose tokens count as computed by now."""
    prompt = rows = context = 0
    for seq, count in zip(plan.sequences, plan.counts):
        if seq.computed - count < len(seq.prompt_ids):
            prompt += count
        else:
            rows, context = rows + count, context + seq.computed
    return prompt, rows, context

"""The plan of one step, and the record of it from which everything that shows what happened is made."""

from __future__ import annotations

import collections.abc as abc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from scheduling.sequence import Sequence


@dataclass(slots=True)
class Plan:
    """What one step computes: `counts[i]` tokens of `sequences[i]`, and the dead weight of a padded policy.

    `held` are finished members that still fill a slot. A padded step computes one row for each of them, and as many
    rows of padding beside the prompts as make a rectangle of tokens. In a step with `drafts`, `drafts[i]` are the tokens
    that `sequences[i]` may get, computed behind its pending one: `counts[i]` is 1 + their number.
    """

    number: int
    started_at: float
    sequences: list[Sequence]
    counts: list[int]
    held: list[Sequence] = field(default_factory=list)
    padded: bool = False
    joined: list[Sequence] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)  # running, but without tokens in this step
    preempted: list[Sequence] = field(default_factory=list)
    repeats: bool = False  # the same members as in the previous step, each of which decodes one token
    decoding: int = 0  # how many of its first members got a token in the previous step, and decode one now
    blocked_by: str | None = None  # one of WAIT_REASONS: why the sequences that were waiting did not join
    drafts: list[list[int]] = field(default_factory=list)  # of each sequence, or nothing at all
    readers: list[Sequence] = field(default_factory=list)  # of pages that rows before theirs compute in this step
    mask_seconds: float = 0.0  # that the step waited for the masks of answers that have a form
    experts: Experts | None = None  # set by a model that is a mixture of them
    like: Iteration | None = None  # the record of the step before, if that repeated, too; then its own

    @property
    def padding(self) -> int:
        """Tokens that fill the rectangle of a padded step, 0 for other steps."""
        if not self.padded or not self.counts:
            return 0
        return max(self.counts) * len(self.counts) - sum(self.counts)

    def phases(self) -> list[str]:
        """Return what each of its sequences does, before it is computed."""
        rest = ["prefill" if seq.is_prefilling else "decode" for seq in self.sequences[self.decoding :]]
        return ["decode"] * self.decoding + rest

    def remove(self, sequences: list[Sequence]) -> None:
        """Take out members that were preempted before the step was computed."""
        gone, had_joined = set(sequences), set(self.joined)
        self._keep([i for i, seq in enumerate(self.sequences) if seq not in gone])
        self.joined = [seq for seq in self.joined if seq not in gone]
        # Those that had just joined were never seen in a batch, so nobody is told that they left it.
        self.preempted = self.preempted + [seq for seq in sequences if seq not in had_joined]
        self.repeats = False

    def pause(self, sequences: list[Sequence]) -> None:
        """Let members compute nothing in this step."""
        gone = set(sequences)
        self._keep([i for i, seq in enumerate(self.sequences) if seq not in gone])
        self.paused = self.paused + sequences

    def stand_alone(self) -> None:
        """Compute what needs nothing of the others: no request may fail because of a draft token, or of a page to come."""
        if self.drafts:
            self.counts = [count - len(drafts) for count, drafts in zip(self.counts, self.drafts)]
            self.drafts = []
        if self.readers:
            self.pause(self.readers)
            self.readers = []

    def part(self, kept: slice) -> Plan:
        """Return the plan of a step for some of its sequences alone, without those that are held."""
        part = replace(self, held=[], repeats=False)
        part._keep(range(len(self.sequences))[kept])
        return part

    def _keep(self, kept: Iterable[int]) -> None:
        kept, self.decoding = list(kept), 0
        # New lists: a plan that repeats shares them with the one before it.
        self.sequences, self.counts = [self.sequences[i] for i in kept], [self.counts[i] for i in kept]
        self.drafts = [self.drafts[i] for i in kept] if self.drafts else []


class Experts(NamedTuple):
    """How many distinct experts of a mixture a step read, of how many in the model, summed over all layers."""

    read: float
    of: int


class Drafted(NamedTuple):
    """How many draft tokens a sequence had in a step, and how many were accepted: its tokens but for one."""

    id: str
    drafted: int
    accepted: int


class Member(NamedTuple):
    """One slot's part in a step: phase is prefill, decode, held or idle; computed and total count tokens."""

    id: str
    slot: int
    phase: str
    tokens: int
    computed: int
    total: int


class Columns(NamedTuple):
    """The fields of all members of a step: tuples of atoms, which the garbage collector does not track."""

    id: abc.Sequence[str] = ()
    slot: abc.Sequence[int] = ()
    phase: abc.Sequence[str] = ()
    tokens: abc.Sequence[int] = ()
    computed: abc.Sequence[int] = ()
    total: abc.Sequence[int] = ()


@dataclass(slots=True)
class Members(abc.Sequence[Member]):
    """The members of a step, stored as columns; a member is built only when something reads it.

    Steps that repeat have the same `shared` columns. All their members that are not held decode, and each of them has
    `more` computed tokens than these columns say.
    """

    shared: Columns
    more: int = 0

    @classmethod
    def of(cls, rows: Iterable[Iterable[Any]]) -> Members:
        """Return members with these fields."""
        return cls(Columns(*zip(*rows)))

    @classmethod
    def of_plan(cls, plan: Plan, phases: list[str] | None) -> Members:
        """Return the members of a computed step, in the `phases` they had before it; None where no record is kept."""
        if phases is None:
            return cls(Columns())
        rows, held, paused = plan.sequences, plan.held, plan.paused
        if held or paused:
            phases = [*phases, *["held"] * len(held), *["idle"] * len(paused)]
            rows = [*rows, *held, *paused]
        return cls(Columns(
            tuple([seq.id for seq in rows]), tuple([seq.slot for seq in rows]), tuple(phases),
            (*plan.counts, *[0] * (len(rows) - len(plan.counts))), tuple([seq.computed for seq in rows]),
            tuple([len(seq.prompt_ids) + seq.max_tokens for seq in rows]),
        ))  # fmt: skip

    def at(self, plan: Plan) -> Members:
        """Return the members of a later step that repeats theirs, after it was computed."""
        known, decoding = self.shared.computed, plan.sequences
        return Members(self.shared, decoding[0].computed - known[0] if known and decoding else 0)

    @property
    def columns(self) -> Columns:
        """The fields of the members of this step."""
        columns, more = self.shared, self.more
        if not more:
            return columns
        computed = [n if phase == "held" else n + more for n, phase in zip(columns.computed, columns.phase)]
        return columns._replace(computed=tuple(computed))

    def __len__(self) -> int:
        return len(self.shared.id)

    def __iter__(self) -> Iterator[Member]:
        return map(Member._make, zip(*self.columns))

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


class SlotSteps(NamedTuple):
    """How the slots of one step were spent; the six kinds add up to the number of the engine's slots.

    A slot whose sequence computes nothing is idle, and so is one that the policy does not use. Recomputed is the part of a
    row that was computed before, rejected the part that computed wrong drafts.
    """

    useful: float = 0.0
    padding: float = 0.0
    held: float = 0.0
    idle: float = 0.0
    recomputed: float = 0.0
    rejected: float = 0.0

    @property
    def fill(self) -> float | None:
        """The share of the slots that had a row; None before the first step."""
        return 1 - self.idle / sum(self) if any(self) else None

    @property
    def in_vain(self) -> float | None:
        """The share of the rows that were computed without a new token; None before the first step."""
        rows = sum(self) - self.idle
        return 1 - self.useful / rows if rows else None

    @classmethod
    def of(cls, plan: Plan, slots: int, recomputes: bool) -> SlotSteps:
        """Return how a step spends its slots if it rejects no draft, before any of its sequences advances.

        If it surely recomputes nothing, no row is looked at.
        """
        rows, held = len(plan.sequences), len(plan.held)
        padding, recomputed = 0.0, 0.0
        width = max(plan.counts) if plan.padded and plan.counts else 0  # of the rectangle's rows
        if width:
            padding = plan.padding / width
        if recomputes and not plan.repeats:  # a row that only decodes recomputes nothing, since its last token is new
            for seq, count in zip(plan.sequences, plan.counts):
                if seq.recompute_until > seq.computed:
                    recomputed += min(count, seq.recompute_until - seq.computed) / (width or count)
        idle = max(0, slots - rows - held)
        return cls(rows - padding - recomputed, padding, held, idle, recomputed)


def reasons(answered: Iterable[Sequence]) -> list[tuple[str, str]]:
    """Return the ids of sequences that have left, each with its reason."""
    return [(seq.id, seq.finish_reason or "abort") for seq in answered]


def begin_of(planned: float, ended: float) -> tuple[float, bool]:
    """Return when a step began, in seconds, and whether it was planned while the one before, until `ended`, was computed."""
    return max(planned, ended), planned < ended - 1e-5  # more than the rounding error of times of day


OPTIONAL = ("mask_seconds", "rows", "blocked_by", "displaced", "drafts", "experts")  # in a record only with a value


@dataclass(slots=True)
class Iteration:
    """One step as it happened: `t` and `seconds` on the scheduler's clock, `queue` the requests left waiting.

    `preempted` sequences lost their slots before it and wait again. `drafts` counts the drafts of each member with some. A
    step that `repeats` has the members of the one before, each of which decodes one token. `blocked_by` is why those that
    waited when it was planned did not join, None if all of them did. In `mask_seconds` of its time it waited for the token
    masks of constrained sequences. `rows` are the numbers of its engine's slots, from and to, where several engines share
    them.
    """

    n: int
    t: float
    seconds: float
    policy: str
    queue: int
    members: Members
    joined: list[str]
    left: list[tuple[str, str]]
    slot_steps: SlotSteps
    pages_used: int
    pages_total: int
    preempted: list[str] = field(default_factory=list)
    repeats: bool = False
    blocked_by: str | None = None
    drafts: list[Drafted] = field(default_factory=list)
    mask_seconds: float = 0.0
    experts: Experts | None = None
    rows: tuple[int, int] | None = None
    batch_size: int = field(init=False)  # rows that were computed, held ones too
    tokens: int = field(init=False)  # that were computed, without the rejected drafts

    def __post_init__(self) -> None:
        members = self.members.shared
        self.batch_size = len(members.id) - members.phase.count("idle")
        self.tokens = sum(members.tokens) - sum([d.drafted - d.accepted for d in self.drafts])

    def to_dict(self, bare: bool = False) -> dict[str, Any]:
        """Return the record as `/events` and trace files have it; a `bare` one has no members."""
        record = {
            "n": self.n,
            "t": self.t,
            "seconds": self.seconds,
            "mask_seconds": self.mask_seconds,
            "rows": self.rows,
            "policy": self.policy,
            "queue": self.queue,
            "blocked_by": self.blocked_by,
            "members": [] if bare else [m._asdict() for m in self.members],
            "joined": self.joined,
            "left": [{"id": id, "reason": reason} for id, reason in self.left],
            "displaced": self.preempted,
            "drafts": [drafted._asdict() for drafted in self.drafts],
            "experts": self.experts and self.experts._asdict(),
            "slot_steps": self.slot_steps._asdict(),
            "pages": {"used": self.pages_used, "total": self.pages_total},
        }
        return {name: value for name, value in record.items() if value or name not in OPTIONAL}

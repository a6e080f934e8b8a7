"""The rows on the device are bit for bit those of the members, whoever was there before."""

from __future__ import annotations

import random

import pytest
import torch

from generate.gpu.rows import Download, Rows
from generate.gpu.sampling import key_of
from generate.params import GREEDY, SamplingParams
from scheduling.sequence import Sequence

CAPACITY, PAGES = 12, 6
CPU = torch.device("cpu")


def sequence(rng: random.Random, i: int) -> Sequence:
    params = SamplingParams(rng.choice([0.0, 0.7, 1.3]), top_k=rng.randrange(9), top_p=rng.choice([1.0, 0.8]), seed=i)
    seq = Sequence([rng.randrange(99) for _ in range(rng.randrange(1, 20))], 50, id=str(i), sampling=params)
    seq.output_ids, seq.computed = [rng.randrange(99)], len(seq.prompt_ids)
    seq.pages = [rng.randrange(1, 99) for _ in range(rng.randrange(1, 4))]
    return seq


def row_by_row(rows: Rows, sequences: list[Sequence], held: list[Sequence]) -> Rows:
    """Return rows that were filled one value after the other, at the places that the members have."""
    expected = Rows(CAPACITY, PAGES, CPU)
    for seq in [*sequences, *held]:
        row, p = rows.row_of[seq], seq.sampling
        position = seq.computed - (seq in held)
        expected.token[row], expected.context_lens[row] = seq.tokens(position, 1)[0], position + 1
        expected.moves[row], expected.key[row], expected.top_k[row] = seq not in held, key_of(p.seed), p.top_k
        expected.inverse_temperature[row], expected.top_p[row] = p.inverse_temperature, p.top_p
        expected.block_tables[row, : len(seq.pages)] = torch.tensor(seq.pages)
    return expected


def test_writing_only_what_changed_gives_the_same_bits() -> None:
    rng = random.Random(3)
    rows, everyone = Rows(CAPACITY, PAGES, CPU), [sequence(rng, i) for i in range(30)]
    members = rng.sample(everyone, 9)
    for _ in range(200):
        stay = rng.sample(members, rng.randrange(len(members) + 1))
        others = [seq for seq in everyone if seq not in stay]
        members = [*stay, *rng.sample(others, rng.randrange(CAPACITY - len(stay) + 1))]
        for seq in rng.sample(everyone, 8):
            seq.computed += 1
            seq.output_ids.append(rng.randrange(99))
            # Pages come, go, are exchanged and moved to another list.
            change = rng.randrange(4)
            if change == 0 and len(seq.pages) < PAGES:
                seq.pages.append(rng.randrange(1, 99))
            elif change == 1 and len(seq.pages) > 1:
                seq.pages[-1] = rng.randrange(1, 99)
            elif change == 2:
                seq.pages = seq.pages[:1]
        live = rng.randrange(len(members) + 1)
        rows.write(members[:live], members[live:])
        assert sorted(rows.row_of.values()) == list(range(len(members)))
        assert rows.members == sorted(members, key=rows.row_of.__getitem__)
        assert rows.positions == [seq.computed - (seq in members[live:]) for seq in rows.members]
        assert torch.equal(rows.buffer, row_by_row(rows, members[:live], members[live:]).buffer)


def test_who_stays_keeps_a_row_and_who_joins_takes_a_free_one() -> None:
    rng = random.Random(4)
    rows, (a, b, c, d, e) = Rows(CAPACITY, PAGES, CPU), [sequence(rng, i) for i in range(5)]
    rows.write([a, b, c, d])
    rows.write([e, d, c, a])
    assert rows.row_of == {e: 1, d: 3, c: 2, a: 0}
    rows.write([d, e])
    assert rows.row_of == {d: 0, e: 1}  # no row beyond the members, so that the smallest step does


def test_an_error_leaves_nothing_of_its_members_in_the_rows() -> None:
    rng = random.Random(6)
    rows, (a, b, c, d) = Rows(CAPACITY, PAGES, CPU), [sequence(rng, i) for i in range(4)]
    rows.write([a, b, c])
    good, d.pages = d.pages, [1] * (PAGES + 1)
    with pytest.raises(ValueError, match="broadcast"):
        rows.write([c, d])
    d.pages = good
    for members in ([b, c], [a, d]):
        rows.write(members)
        assert torch.equal(rows.buffer, row_by_row(rows, members, []).buffer)


def test_tokens_that_only_the_device_has_follow_their_sequences() -> None:
    rng = random.Random(5)
    rows, (a, b, c, d) = Rows(CAPACITY, PAGES, CPU), [sequence(rng, i) for i in range(4)]
    new = Sequence([5, 6, 7], 9, sampling=GREEDY, pages=[70])
    rows.write([a, b, c], [d])
    rows.token[:3] = torch.tensor([31, 32, 33])  # as a step leaves them
    rows.follow([c, a], [d], {new: 1}, Download(torch.tensor([-1, 34])))
    for seq, token in ((a, 31), (c, 33), (new, 34)):
        seq.computed = seq.length
        seq.output_ids.append(token)
    assert torch.equal(rows.buffer, row_by_row(rows, [c, a, new], [d]).buffer)


def test_a_copy_on_its_way_to_the_host_does_not_see_later_numbers() -> None:
    numbers = torch.tensor([1, 2, 3])
    copy = Download(numbers)
    numbers.zero_()
    assert copy.read() == [1, 2, 3]

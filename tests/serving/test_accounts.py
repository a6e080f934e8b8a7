"""Calls of programs: whom each goes on from, what a program has received, and how little of it is remembered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from scheduling.latest import KEPT
from scheduling.sequence import Sequence
from serving.call import Call
from serving.programs import MOST_LAST, Programs


def begin(programs: Programs, *names: str, **more: str) -> Call:
    found = programs.begin(*names, **more)
    assert found
    return found


def end(programs: Programs, call: Call | None, id: str = "x", error: object = None, **fields: Any) -> None:
    seq = Sequence([1] * 5, 3, id=id, computed=7, output_ids=[1, 2, 3], cached=fields.pop("cached", 0))
    left: Any = SimpleNamespace(id=id, call=call, sequence=seq, error=error, **{"first": None, **fields})
    programs.charge(left, left.call)


def test_a_call_goes_on_from_the_one_before_it_in_its_session() -> None:
    programs = Programs()
    for turn in range(3):
        call = begin(programs, session="chat")
        assert call == ("chat", "chat", "", turn + 1, (f"turn {turn - 1}",) if turn else ())
        end(programs, call, f"turn {turn}")
    assert programs.begin() is None


def test_parallel_calls_follow_the_plan_and_the_join_follows_all_of_them() -> None:
    programs = Programs()
    end(programs, programs.begin("p"), "plan")
    parts = [begin(programs, "p") for _ in range(3)]
    assert [call.after for call in parts] == [("plan",)] * 3
    for number, call in enumerate(parts):
        end(programs, call, f"part {number}")
    join = begin(programs, "p")
    assert (join.depth, join.after) == (3, ("part 0", "part 1", "part 2"))


def test_a_session_goes_on_from_those_that_it_started_and_the_names_of_its_program_need_not_be_repeated() -> None:
    programs = Programs()
    end(programs, programs.begin(session="main"), "main 0")
    sub = begin(programs, session="sub", parent="main")
    other = begin(programs, session="other", program="main")
    assert (sub.program, sub.after) == ("main", ("main 0",))
    end(programs, sub, "sub 0")
    again = begin(programs, session="sub")
    assert (again.program, again.depth, again.after) == ("main", 3, ("sub 0",))
    end(programs, again, "sub 1")
    end(programs, other, "other 0")
    joined = begin(programs, session="main")
    assert joined.after == ("sub 1",)
    below = begin(programs, session="deeper", parent="sub")
    assert (below.program, below.after) == ("main", ("sub 1",))


def test_a_failed_call_is_no_parent_and_a_copy_has_received_nothing() -> None:
    programs = Programs()
    end(programs, programs.begin("p"), "failed", error="cancelled")
    end(programs, programs.begin("p"), "copy", first=object())
    end(programs, programs.begin("p"), "cached", cached=4)
    call = begin(programs, "p")
    found = programs.describe(call)
    assert found == {
        "name": "p", "depth": 3, "after": ("cached",), "calls": 3, "prompt_tokens": 5 + 1, "output_tokens": 6,
    }  # fmt: skip


def test_a_hundred_thousand_programs_leave_the_accounts_of_the_last() -> None:
    programs, early = Programs(), Call("p0", "", "", 1, ())
    left: Any = SimpleNamespace(id="x", call=early, sequence=Sequence([1], 1), error=None, first=None)
    for number in range(100_000):
        left.call = programs.begin(f"p{number}", f"session {number}", f"parent {number}")
        programs.charge(left, left.call)
    assert len(programs._accounts) == len(programs._sessions) == KEPT
    end(programs, early)  # of a program that is forgotten
    assert programs.describe(early) == {
        "name": "p0", "depth": 1, "after": (), "calls": 0, "prompt_tokens": 0, "output_tokens": 0,
    }  # fmt: skip
    assert len(programs._accounts) == KEPT


def test_calls_at_once_without_end_leave_the_last_of_them() -> None:
    programs = Programs()
    calls = [programs.begin("p") for _ in range(1000)]
    for number, call in enumerate(calls):
        end(programs, call, f"{number}")
    join = begin(programs, "p")
    assert join.after == tuple(f"{number}" for number in range(1000 - MOST_LAST, 1000))

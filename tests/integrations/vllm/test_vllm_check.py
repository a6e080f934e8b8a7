"""The laws for vLLM's scheduler, held against a stand-in of it that is whole, and against some that are not."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from integrations.vllm import check, serve
from integrations.vllm.check import broken_by
from simulate.laws.case import Case, Request
from simulate.laws.shrink import Shrinker
from tests.integrations.vllm.small_vllm import OwnQueue, SmallScheduler, request

KIND = {"ahead": False, "policy": "fcfs", "chunked": True}
CASE = Case(tuple(Request(i // 3, (0,) * 5, 2 + i % 3) for i in range(8)), slots=3, pages=(7, 4))


class FakeMocked:
    def __init__(self, cls: Any, slots: int, tokens: int, blocks: int, size: int, **kind: Any) -> None:
        self.scheduler = cls(slots, tokens, blocks)
        self.ended, self.tokens = dict[str, str](), Counter[str]()

    def add(self, id: str, prompt: list[int], tokens: int, **more: Any) -> None:
        self.scheduler.add_request(request(id, len(prompt), tokens))

    @property
    def free(self) -> int:
        return int(self.scheduler.get_num_free_blocks())

    @property
    def is_over(self) -> bool:
        return not self.scheduler.requests

    def plan(self) -> tuple[Any, list[str]]:
        ran = [one.request_id for one in self.scheduler.running]
        self._output = self.scheduler.schedule()
        self._output.preempted_req_ids = {one.request_id for one in self.scheduler.waiting if one.request_id in ran}
        rows = [self.scheduler.requests[id] for id in self._output.num_scheduled_tokens]
        self._due = [row.request_id for row in rows if row.num_computed_tokens == row.num_tokens]
        return self._output, self._due

    def compute(self) -> None:
        self.scheduler.update_from_output(self._output, None)
        self.tokens.update(self._due)
        self.ended |= {id: "length" for id in self._due if id not in self.scheduler.requests}


class Idle(SmallScheduler):
    def __init__(self, slots: int, *sizes: int) -> None:
        super().__init__(1, *sizes)


class Stuck(SmallScheduler):
    def update_from_output(self, output: Any, model: Any) -> dict[int, Any]:
        return {}


class LastFirst(SmallScheduler):
    class Queue(OwnQueue):
        add_request = OwnQueue.prepend_request

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.waiting = self.Queue()


class Leaking(SmallScheduler):
    def _free_request(self, request: Any) -> None:
        super()._free_request(request)
        self.num_gpu_blocks -= request.request_id == "r7"


class Forgetful(SmallScheduler):
    def _update_request_with_output(self, request: Any, ids: list[int]) -> tuple[list[int], bool]:
        ids, _ = super()._update_request_with_output(request, ids)
        return ids, True


@pytest.fixture
def broken() -> Iterator[Any]:
    mocked = ModuleType("mocked_vllm")
    vars(mocked).update(Mocked=FakeMocked, CONTEXT=1000)
    with patch.dict(sys.modules, {"integrations.vllm.mocked_vllm": mocked}):
        yield lambda cls, case=CASE, law="": broken_by(KIND | {"cls": cls}, case, law)


def test_a_scheduler_that_is_whole_keeps_the_laws(broken: Any) -> None:
    assert broken(SmallScheduler) is None


@pytest.mark.parametrize(
    ("cls", "law"),
    [
        (Idle, "no idle slot while a request fits"),
        (Stuck, "no request starves"),
        (LastFirst, "bounded overtaking"),
        (Leaking, "no page is leaked"),
        (Forgetful, "no request is lost"),
    ],
)
def test_a_scheduler_that_is_not_breaks_one(broken: Any, cls: type[Any], law: str) -> None:
    assert broken(cls).law == law


@pytest.mark.parametrize(("line", "message"), [(["--cases", "0"], "at least 1"), ([], "EB_VLLM_PYTHON")])
def test_what_cannot_be_checked_is_told_at_once(
    line: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(serve, "version", missing)
    with pytest.raises(SystemExit):
        check.main(line)
    assert message in capsys.readouterr().err


def test_the_smallest_case_has_only_what_it_needs(broken: Any) -> None:
    found = broken(Idle)
    _, case = Shrinker(lambda case: broken(Idle, case, found.law), CASE, found).run()
    assert [(len(r.prompt), r.output) for r in case.requests] == [(1, 1)] * 2
    assert case.slots == 2

"""The kernels' threads do every item once, and wait for no helper that has not begun."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from generate.cpu.kernels import KernelError, load_library
from generate.cpu.team import SOURCE, Team
from tests.support import points
from tests.support.generate import need_compiler

COUNTER = """
#include "team.h"
#include <stdatomic.h>
static _Atomic int done[100000];
static _Atomic int low = 1 << 30, high = -1;
static void mark(void *job, int64_t first, int64_t last, int worker) {
  for (int64_t i = first; i < last; i++) atomic_fetch_add(&done[i], *(int *)job);
  if (worker > high) high = worker;
  if (worker < low) low = worker;
}
void count(int64_t n, int64_t grain, int by) { share_out(mark, &by, n, grain); }
int at(int i) { return done[i]; }
int highest(void) { return high; }
int lowest(void) { return low; }
void forget(void) { low = 1 << 30, high = -1; }
int known(void) { return workers; }
"""


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    need_compiler()
    folder = tmp_path_factory.mktemp("team")
    (folder / "team.h").write_text((SOURCE.parent / "team.h").read_text())
    (folder / "counter.c").write_text(COUNTER)
    library = load_library(folder / "counter.c")
    library.count.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    return library


@pytest.fixture
def team(counter: ctypes.CDLL) -> Iterator[Team]:
    team = Team()
    team.join(counter)
    counter.forget()
    yield team
    team.use(1, own=True)


@pytest.mark.parametrize("own", points(1, True, False))
def test_every_item_of_many_jobs_is_done_once(team: Team, counter: ctypes.CDLL, own: bool) -> None:
    team.use(4, own)
    sizes = [1, 2, 3, 7, 64, 1000, 99_999]
    before = [counter.at(i) for i in range(100_000)]
    for repeat in range(40 * len(sizes)):
        counter.count(sizes[repeat % len(sizes)], 1 + repeat % 5, 1)
    expected = [40 * sum(size > i for size in sizes) for i in range(100_000)]
    assert [counter.at(i) - old for i, old in enumerate(before)] == expected
    assert 0 <= counter.lowest() <= counter.highest() < team.size == counter.known()


def test_a_larger_team_of_others_gives_no_worker_a_number_without_memory(team: Team, counter: ctypes.CDLL) -> None:
    team.use(2, own=True)
    Team().use(4, own=True)
    for _ in range(100):
        counter.count(10_000, 1, 1)
    assert counter.highest() < counter.known() == 2


def test_helpers_that_fell_asleep_are_woken(team: Team, counter: ctypes.CDLL) -> None:
    team.use(3, own=True)
    before = counter.at(0)
    for _ in range(5):
        threading.Event().wait(0.01)  # far longer than they spin
        counter.count(100, 1, 1)
    assert counter.at(0) == before + 5


def test_two_concurrent_callers_do_not_mix_their_jobs(team: Team, counter: ctypes.CDLL) -> None:
    team.use(3, own=True)
    before = [counter.at(i) for i in range(5000)]

    def call(by: int) -> None:
        for _ in range(200):
            counter.count(5000, 7, by)

    threads = [threading.Thread(target=call, args=(by,)) for by in (1, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {counter.at(i) - old for i, old in enumerate(before)} == {200 * 1001}


def test_one_thread_works_alone(team: Team, counter: ctypes.CDLL) -> None:
    team.use(1, own=True)
    assert team.size == counter.known() == 1


def test_without_a_compiler_one_thread_computes(
    team: Team, counter: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> ctypes.CDLL:
        raise KernelError("no C compiler")

    monkeypatch.setattr("generate.cpu.team._library", refuse)
    team.use(4, own=True)
    assert team.size == 1
    assert "no C compiler" in caplog.text
    before = counter.at(9)
    counter.count(10, 1, 1)
    assert counter.at(9) == before + 1


def test_a_changed_header_compiles_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EB_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "a.c").write_text('#include "a.h"\nint answer(void) { return ANSWER; }\n')
    for answer in (1, 2):
        (tmp_path / "a.h").write_text(f"#define ANSWER {answer}\n")
        try:
            assert load_library(tmp_path / "a.c").answer() == answer
        except KernelError as error:
            pytest.skip(str(error))

"""The README's policy of one's own: checked, simulated and served as it stands there; the trace of one's own too."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import policies
from batching import BatchingManager, Inference
from costs.mock import MockModel
from costs.published import Constant
from scheduling.iteration import Iteration
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.__main__ import main
from simulate.laws.check import check
from simulate.simulator import simulate
from tests.support import ROOT

Step = tuple[int, list[str], list[str]]
SLOTS = 8
README = (ROOT / "README.md").read_text("utf-8")


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """Write the file that the README shows."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    (code,) = (block for block in blocks if "class Policy" in block)
    assert len(code.splitlines()) <= 20
    (tmp_path / "mine.py").write_text(code)
    return str(tmp_path / "mine.py")


def asked() -> list[tuple[list[int], int]]:
    """Return prompts and lengths of 40 requests that come at once."""
    rng = np.random.default_rng(3)
    return [([i, *range(int(rng.integers(1, 30)))], int(rng.integers(1, 25))) for i in range(40)]


def steps(records: list[Iteration]) -> list[Step]:
    """Return of each step the size of the batch, who joined and who left."""
    return [(r.batch_size, list(r.joined), [id for id, _ in r.left]) for r in records]


def served(policy: str) -> list[Step]:
    """Serve the requests by the loop of the server, its thread and a model that sleeps."""
    manager = BatchingManager(MockModel(Constant(0.0005, 0.0)), max_batch_size=SLOTS)
    records: list[Iteration] = []
    manager.observers.append(lambda iteration, left: iteration and records.append(iteration))
    inferences = [Inference("", n, prompt, id=str(i)) for i, (prompt, n) in enumerate(asked())]
    manager.enqueue_all(inferences)
    manager.start(policies.get_policy(policy, SLOTS))
    for inference in inferences:
        inference.wait_for_completion(60)
    manager.stop()
    return steps(records)


def simulated(policy: str) -> list[Step]:
    """Serve them by the simulator, on a virtual clock."""
    sequences = [Sequence(prompt, n, id=str(i)) for i, (prompt, n) in enumerate(asked())]
    scheduler = Scheduler(policies.get_policy(policy, SLOTS))
    return steps(simulate(scheduler, sequences, Constant(0.0005, 0.0), records=True).iterations)


def test_the_readmes_policy_keeps_every_law(mine: str) -> None:
    verdict = check(mine, cases=100, large=1)
    assert verdict.broken is None, str(verdict)


def test_it_decides_the_same_in_the_server_and_in_the_simulator(mine: str) -> None:
    found = served(mine)
    assert found == simulated(mine)
    lengths = [asked()[int(id)][1] for _, joined, _ in found for id in joined]
    assert lengths == sorted(lengths)  # the shortest first
    assert found != simulated("dynamic")


def test_it_gains_what_the_readme_shows(
    mine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = re.search(r"^\./eb simulate (run .*? mine\.py .*?)\n```\n\n```text\n(.*?)```", README, re.S | re.M)
    assert shown
    monkeypatch.chdir(Path(mine).parent)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(shlex.split(shown[1])) == 0
    printed = [line.rstrip() for line in capsys.readouterr().err.splitlines()]
    assert [line for line in shown[2].splitlines() if line not in printed] == []


def test_the_trace_of_the_recipes_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/simulator.md").read_text("utf-8")
    shown = re.search(r"```csv\n(.*?)```\n\n```bash\n\./eb simulate (.*?)\n", page, re.S)
    assert shown
    trace, command = shown.groups()
    (tmp_path / "my.csv").write_text(trace)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0
    assert "skipped" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1\nclass Policy(\n", "SyntaxError"),
        ("x = 1\nimport missing_module\n", "ModuleNotFoundError"),
        ("x = 1\nraise SystemExit\n", "SystemExit"),
    ],
)
def test_a_policy_file_that_cannot_be_loaded_is_a_named_error_with_its_line(tmp_path, text, reason):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}.*line 2.*{reason}"):
        policies.get_policy(str(path))


HEAD = "from policies import tgi\nfrom scheduling import policy\n\nclass Policy(policy.Policy):\n"
WRONG = {
    "oder(self, waiting, now): return waiting": "nothing uses oder(). Rename it to order()",
    "sort(self, waiting, now): return waiting": "order() or deadline()",
    "order(self, waiting): return waiting": "Write `def order(self, waiting, now)`",
    "order(self, waiting, now): sorted(waiting, key=lambda seq: seq.max_tokens)": "returns nothing. Return the waiting requests",
    "__init__(self, limit): super().__init__(limit)": "Write `def __init__(self)`",
    "__init__(self, max_batch_size, **options): self.count = 0": "super().__init__(max_batch_size, **options)",
    "__init__(self): raise SystemExit": "__init__() raises SystemExit",
    "__init__(self): self.count = unheard_of": "NameError: name 'unheard_of' is not defined (Define or import it)",
}
RIGHT = """    def __init__(self):
        self.count = 0
    def ordered(self, waiting, now):
        return sorted(waiting, key=self.key)
    def key(self, seq):
        return seq.max_tokens
    def order(self, waiting, now):
        self.count += 1
        return self.ordered(waiting, now)
"""


def written(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(text)
    return str(folder / "mine.py")


@pytest.mark.parametrize("method", WRONG)
def test_a_hook_that_could_never_do_what_is_meant_is_refused_when_its_file_is_loaded(tmp_path, method):
    with pytest.raises(policies.PolicyFileError) as refused:
        policies.get_policy(written(tmp_path, f"{HEAD}    def {method}\n"))
    assert refused.value.line == 5
    assert WRONG[method] in refused.value.words


@pytest.mark.parametrize(
    "text", [HEAD + "    paded = True\n", HEAD.replace("class Policy", "class Mine") + "    pass\n"]
)
def test_a_misspelled_attribute_or_class_is_refused_too(tmp_path, text):
    with pytest.raises(ValueError, match=r"mine.py.*(padded|class Policy)"):
        policies.get_policy(
            written(tmp_path, text.replace("policy\n", "policy\nfrom scheduling.policy import Policy\n"))
        )


def test_helpers_that_the_file_uses_may_have_any_name(tmp_path: Path) -> None:
    verdict = check(written(tmp_path, HEAD + RIGHT), cases=30, large=0)
    assert verdict.broken is None, str(verdict)


@pytest.mark.parametrize(
    ("base", "call"), [("policy.Policy", ""), ("policy.Policy", "super().__init__(); "), ("tgi.Policy", "")]
)
@pytest.mark.parametrize("arguments", ["self", "self, factor=2"])
def test_an_init_that_needs_no_arguments_comes_after_options_and_slots(tmp_path, base, call, arguments):
    init = f"    def __init__({arguments}):\n        {call}self.seen = [self.max_batch_size, *vars(self)]\n"
    made = policies.get_policy(written(tmp_path, HEAD.replace("policy.Policy", base) + init), 3)
    assert made.seen[0] == made.renew().seen[0] == 3
    assert "claims" in made.seen
    assert base != "tgi.Policy" or "ratio" in made.seen


def test_the_state_of_an_order_is_set_under_every_loop(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD.replace("Policy(", "Order(") + RIGHT)
    for loop in policies.names():
        assert policies.get_policy(f"{loop}+{path}", 2).count == 0  # type: ignore[attr-defined]


OWN_QUEUE = '''"""Last come, first served, from a queue of its own."""
from scheduling import policy


class Policy(policy.Policy):
    def __init__(self, max_batch_size, **options):
        super().__init__(max_batch_size, **options)
        self.stack = []

    def on_arrival(self, seq, now):
        self.stack.append(seq)

    def on_admit(self, seq, now):
        self.stack.remove(seq)

    def on_cancel(self, seq, now):
        if seq in self.stack:
            self.stack.remove(seq)

    def order(self, waiting, now):
        return self.stack[::-1]
'''


@pytest.mark.parametrize("use", ["order = pick", "def order(self, *hook): return getattr(self, 'pick')(*hook)"])
def test_a_method_that_the_file_names_elsewhere_is_used(tmp_path: Path, use: str) -> None:
    pick = "    def pick(self, waiting, now): return waiting[::-1]\n"
    made = policies.get_policy(written(tmp_path, f"{HEAD}{pick}    {use}\n"))
    first, last = Sequence([1], 1), Sequence([1], 1)
    assert [*made.order([first, last], 0.0)] == [last, first]


def test_a_module_beside_the_file_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "lib.py").touch()
    with pytest.raises(policies.PolicyFileError, match=r"line 1: cannot import lib.py.*PYTHONPATH"):
        policies.get_policy(written(tmp_path, "import lib\n"))


def test_a_queue_of_its_own_loses_no_preempted_request(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_QUEUE)
    verdict = check(str(tmp_path / "own.py"), cases=150, large=0)
    assert verdict.broken is None, str(verdict)


def test_a_request_that_is_preempted_counts_once_for_its_clients_limit() -> None:
    policy = policies.get_policy("dynamic+rpm", SLOTS, {"limit": 2})
    seq, now = Sequence([1], 5, client="alice"), 1.0
    policy.on_arrival(seq, now)
    policy.on_admit(seq, now)
    seq.preempt()
    policy.on_preempt(seq, now)
    assert not policy.refuse(Sequence([1], 5, client="alice"), now)

"""How the simulator answers mistakes on its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulate.__main__ import main
from tests.support.simulate import run_command

MISTAKES = [
    ("rum", "'rum'", "Did you mean 'run'?"),
    ("run", "POLICY", "missing"),
    ("run dinamic", "dinamic", "Did you mean 'dynamic'?"),
    ("run dynamic dynamic", "dynamic", "twice"),
    ("run dynamic --rat 3", "--rat", "Did you mean '--rate'?"),
    ("run dynamic --rate 0", "--rate", "above 0"),
    ("run dynamic --num x", "--num", "'x'"),
    ("run dynamic --seed -1", "--seed", "at least 0"),
    ("run dynamic --cost lm-mock", "lm-mock", "Did you mean 'llm-mock'?"),
    ("run dynamic --cost HERE/none.json", "none.json", "No such file"),
    ("run dynamic --cost HERE/words.json", "words.json", "calibrate"),
    ("run dynamic --cost-option a=b", "--cost-option a", "'b'"),
    ("run dynamic --cost-option base=-1", "--cost-option base", "at least 0"),
    ("run dynamic --cost llm-mock --cost-option rate=0", "llm-mock", "--cost-option"),
    ("run dynamic --cost splitwise --cost-option prefill=1", "'prefill'", "mixed"),
    ("run window --policy-option delay=1 --policy-option delay=2", "delay", "twice"),
    ("run dynamic --policy-option x", "--policy-option", "'x'"),
    ("run dynamic --workload orka", "orka", "Did you mean 'orca'?"),
    ("run dynamic --kv-tokens 64", "--kv-tokens", "64"),
    ("run dynamic --policy-option reserve=prompt", "reserve=prompt", "--kv-tokens 65536"),
    ("run static --kv-tokens 640 --open-ended", "static", "Use dynamic"),
    ("run dynamic --open-ended", "--open-ended", "--kv-tokens 65536"),
    ("run dynamic --drafts 4", "--drafts", "Use --acceptance"),
    ("run dynamic --acceptance 1.5", "--acceptance", "from 0 to 1"),
    ("run dynamic --acceptance 0.5 --drafts 17", "--drafts", "auto"),
    ("run static --acceptance 0.5", "--acceptance", "Use dynamic"),
    ("run dynamic --engine ragged", "--engine ragged", "was removed in 0.2.0"),
    ("run dynamic --copies 2", "--copies", "was removed in 0.2.0"),
    ("run dynamic --trace HERE/good.csv --page-size 512", "--page-size 512", "Use --kv-tokens"),
    ("run dynamic --no-requests", "--no-requests", "fleet --replicas 1"),
    ("try mine.py --no-open", "--no-open", "was removed in 0.2.0"),
    ("run dynamic --preemption swap", "--preemption", "was removed in 0.2.0"),
    ("run dynamic --evict belady", "--evict belady", "--kv-tokens 4096"),
    ("run dynamic --evict ttl --kv-tokens 640", "--evict ttl", "--workload agent"),
    ("run dynamic --workload agent:90", "agent:90", "Use fewer turns"),
    ("run dynamic --context 3", "--context", "3"),
    ("run dynamic --max-tokens-per-step 8", "--max-tokens-per-step", "32"),
    ("run dynamic --speed 2", "--speed", "--trace"),
    ("run dynamic --speed 1e-320 --trace HERE/good.csv", "1e-320", "Use a higher --speed"),
    ("run dynamic --rate 1e-320", "poisson", "Use a higher rate"),
    ("run dynamic --trace HERE/none.csv", "none.csv", "No such file"),
    ("run dynamic --trace HERE", "HERE", "directory"),
    ("run dynamic --workload trace:HERE", "HERE", "folder"),
    ("run dynamic --trace HERE/bytes.csv", "bytes.csv", "arrival_s, prompt_tokens"),
    ("run dynamic --trace HERE/empty.csv", "empty.csv", "arrival_s, prompt_tokens"),
    ("run dynamic --out HERE/empty.csv/x", "empty.csv", "directory"),
    ("run dynamic --no-plots", "--no-plots", "--out"),
    ("plan dynamic --limit p99:tft:1", "p99:tft:1", "as in p99:ttft:1"),
    ("plan dynamic --ttft 0", "--ttft", "above 0"),
    ("plan dynamic --trace HERE/none.csv", "none.csv", "No such file"),
    ("plan dynamic --arrivals burst", "burst", "poisson"),
    ("plan dynamic --out HERE/a.png", "--out", "was removed in 0.2.0"),
    ("fleet dynamic --router randm", "randm", "Did you mean 'random'?"),
    ("fleet dynamic --router random --router random", "random", "twice"),
    ("fleet dynamic --router prefix-aware", "prefix-aware", "--kv-tokens"),
    ("fleet dynamic --replicas 0", "--replicas", "at least 1"),
    ("prefix --trace HERE/good.csv", "--trace", "run dynamic --trace FILE"),
    ("prefix --sizes 0 --train 90", "--train", "--sizes"),
    ("calibrate --model nope", "'nope'", "gpt2-medium"),
    ("calibrate --steps 0", "--steps", "at least 1"),
    ("calibrate --out HERE", "--out", "cost.json"),
    ("validate nope", "'nope'", "dynamic"),
    ("validate dynamic --rate 0", "--rate", "above 0"),
    ("validate dynamic --modle bard", "--modle", "Did you mean '--model'?"),
    ("validate dynamic --model bard --dtype f32", "--dtype", "Use one of: auto, float32"),
    ("validate dynamic", "--cost", "is missing"),
    ("validate dynamic --model bard --cost-option base=1", "--cost-option base=1", "no effect without --cost. Add it"),
    ("validate dynamic --url http://127.0.0.1:1", "--url", "was removed in 0.2.0"),
    ("predict HERE/none", "predict", "was removed in 0.2.0"),
    ("arena --only", "--only", "my_policy.py"),
    ("arena nope --only", "'nope'", "dynamic"),
    ("arena --workloads orka", "orka", "Did you mean 'orca'?"),
    ("grade sjv dynamic", "'sjv'", "sjf"),
    ("grade sjf", "POLICY", "missing"),
    ("check", "POLICY", "missing"),
    ("check nope", "'nope'", "dynamic"),
    ("check dynamic --cases=-1", "--cases", "at least 0"),
]


@pytest.mark.parametrize(("line", "named", "more"), MISTAKES)
def test_a_mistake_is_answered_in_one_line_with_a_remedy(
    line: str, named: str, more: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "bytes.csv").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "good.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,4,3\n1,4,3\n")
    (tmp_path / "words.json").write_text('{"cost": {"kind": "affine", "base": "x"}}')
    _, err = run_command(capsys, *line.replace("HERE", str(tmp_path)).split(), code=2)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert named.replace("HERE", str(tmp_path)) in err
    assert more in err
    assert any(remedy in err for remedy in ("Use ", "Add ", "Change ", "Check ", "Name ", "Make ", "Run ", "Leave "))


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("    def order(self, waiting, now):\n        raise KeyError(1)\n", 1, "order() of mine.py, line 5: KeyError: 1"),
        ("    def order(self, waiting, now):\n        if now < 0:\n            return waiting\n", 1, "returned None. Return the"),
        ("    def order(self, waiting, now):\n        waiting.sort()\n        return waiting\n", 1, "Use sorted(waiting"),
        ("    def allocate_tokens(self, running, token_budget):\n        return {}\n", 1, "line 4: allocate_tokens() returned {}"),
        ("    def __init__(self):\n        raise KeyError(1)\n", 2, "line 5: __init__() raises KeyError: 1"),
        ("    def oder(self, waiting, now):\n        return waiting\n", 2, "line 4: nothing uses oder(). Rename it to order()"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["run --num 30", "check --cases 9"])
def test_an_error_in_a_policy_is_a_sentence_with_its_line(
    command: str, body: str, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"from scheduling import policy\n\nclass Policy(policy.Policy):\n{body}")
    assert main([*command.split(), str(path)]) == code
    captured = capsys.readouterr()
    told = captured.out if command.startswith("check") and code == 1 else captured.err
    assert words in told.replace("\n", " ")
    assert "Traceback" not in told

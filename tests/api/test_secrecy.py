"""What must be nowhere: pickles, prompts in logs, models without a pinned revision, checks by assertion."""

from __future__ import annotations

import ast
import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from dialects import EVERY, post

from api.service import Service
from app import create_app
from config import Config
from models.sources import hub
from observe.queued_log import QueuedLog
from tests.support import ROOT, SOON
from tests.support.fakes import FakeModel, fake_engine

SECRET = "the-secret-of-the-prompt"
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FROM_OURSELVES = ROOT / "launch" / "front_ends" / "wire.py"  # between processes with one master, over a pair of sockets
AWAY = {"tests", "dev", "docs", "results"}


def sources() -> Iterator[Path]:
    """Yield the files of the product."""
    for path in (*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py")):
        if path.relative_to(ROOT).parts[0] not in AWAY:
            yield path


def test_no_pickle_is_read() -> None:
    suspects = re.compile(rf"\b({'|'.join(UNSAFE)}|trust_remote_code)\b|\.load\b")  # parsing every file takes a second
    found = [path for path in sources() if suspects.search(path.read_text("utf-8"))]
    assert found
    for path in found:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            unsafe = UNSAFE - {"marshal"} if path == FROM_OURSELVES else UNSAFE
            assert not unsafe & {name.partition(".")[0] for name in names}, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
                called = ast.unparse(node.func)
                assert called != "torch.load", path
                assert called not in ("np.load", "numpy.load") or "allow_pickle=False" in ast.unparse(node), path
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert ast.unparse(node.value) != "True", path


def test_published_models_are_pinned_to_a_commit() -> None:
    for name, model in hub.PUBLISHED.items():
        assert re.fullmatch("[0-9a-f]{40}", model.repository.revision), name


@pytest.mark.parametrize("breaks", [False, True])
def test_no_prompt_and_no_answer_reaches_a_log(
    breaks: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    model = FakeModel(says=b"answer-to-nobody ")
    engine = fake_engine(model)
    app = create_app(Config(), engine)
    service: Service = app.extensions["service"]
    service.serves, lines = True, io.StringIO()
    service.access_log = QueuedLog(lines)
    service.access_log.start()
    if breaks:
        model.before = lambda plan: (_ for _ in ()).throw(RuntimeError("the step broke"))
    client = app.test_client()
    for dialect in EVERY:
        post(client, dialect, prompt=SECRET, limit=20, stream=dialect.path == "/inference").close()
    for path, body in (
        ("/v1/responses", {"input": "hi", "metadata": {"a": SECRET}}), ("/tokenize", {"prompt": SECRET}),
        ("/inference", {"prompt": [SECRET], "num_tokens": 20}), ("/inference", {"prompt": SECRET, "num_tokens": 20}),
    ):  # fmt: skip
        client.post(path, json=body).close()
    engine.manager.stop()
    service.access_log.flush(SOON)
    said = capfd.readouterr()
    everything = lines.getvalue() + caplog.text + said.out + said.err
    assert lines.getvalue().count("\n") == len(EVERY) + 4
    assert SECRET not in everything
    assert "answer-to-nobody" not in everything

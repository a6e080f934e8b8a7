"""The files and batches of a server, in a folder: a SQLite database, and a file for each uploaded or written one.

Everything survives the end of the process at any moment. Any thread may call any method, and two processes may use one
folder, as they do while a server reloads. It must not know HTTP, or how a batch is computed.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ACTIVE = ("validating", "in_progress", "finalizing")
OPEN = (*ACTIVE, "cancelling")
STATUSES = (*OPEN, "completed", "failed", "expired", "cancelled")
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    input_file_id TEXT NOT NULL, endpoint TEXT NOT NULL, completion_window TEXT NOT NULL, metadata TEXT, status TEXT NOT NULL,
    output_id TEXT NOT NULL, error_id TEXT NOT NULL, output_file_id TEXT, error_file_id TEXT, errors TEXT,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    created_at INTEGER NOT NULL, in_progress_at INTEGER, expires_at INTEGER NOT NULL, finalizing_at INTEGER,
    completed_at INTEGER, failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER);
CREATE INDEX IF NOT EXISTS open_batches ON batches (status, number);
"""

IS_ACTIVE, IS_OPEN = f"status IN {ACTIVE}", f"status IN {OPEN}"  # of batches
ABANDONED_SECONDS = 3600  # since an upload wrote last


class InUse(Exception):
    """A file cannot be deleted because a batch reads or writes it; the argument is the id of the batch."""


class Store:
    """One folder of files and batches; those of an owner are invisible to all others."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._files = folder / "files"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds prompts and answers
        self._files.mkdir(exist_ok=True)
        self._clock = clock
        self._lock = threading.Lock()
        self._db = sqlite3.connect(folder / "batches.sqlite", timeout=30, check_same_thread=False)
        self._db.isolation_level = "IMMEDIATE"  # of `_change`
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.executescript(SCHEMA)

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    def path(self, id: str) -> Path:
        """Return where the content of a file is; `id` must be one of ours."""
        return self._files / id

    def now(self) -> int:
        return int(self._clock())

    def _all(self, query: str, values: Mapping[str, Any] | tuple[Any, ...] = ()) -> list[Row]:
        with self._lock:
            return [dict(row) for row in self._db.execute(query, values).fetchall()]

    def _change(self, *statements: tuple[str, Mapping[str, Any] | tuple[Any, ...]]) -> int:
        """Execute statements as one transaction; return the number of rows that the last one changed."""
        with self._lock, self._db:
            return [self._db.execute(*statement).rowcount for statement in statements][-1]

    def add_file(self, content: Path, owner: str, filename: str, purpose: str) -> Row:
        """Move a file into the store; return its row."""
        id = f"file-{uuid.uuid4().hex}"
        size = content.stat().st_size
        os.replace(content, self.path(id))
        try:
            self._change(_insert_file(id, owner, filename, purpose, size, self.now()))
        except sqlite3.Error:
            self.path(id).unlink(missing_ok=True)
            raise
        return self.row("files", id, owner) or {}

    def row(self, table: str, id: str, owner: str) -> Row | None:
        """Return an owner's file or batch, which is in `table`, or None."""
        return next(iter(self._all(f"SELECT * FROM {table} WHERE id = ? AND owner = ?", (id, owner))), None)

    def rows(
        self, table: str, owner: str, after: str, limit: int, newest_first: bool = True, purpose: str = ""
    ) -> list[Row]:
        """Return an owner's files, of one purpose if given, or batches, after the one with the id `after`; at most `limit`."""
        where = "AND purpose = :purpose " if purpose else ""
        if after:
            sign = "<" if newest_first else ">"
            where += f"AND number {sign} (SELECT number FROM {table} WHERE id = :after AND owner = :owner) "
        order = "DESC" if newest_first else "ASC"
        query = f"SELECT * FROM {table} WHERE owner = :owner {where}ORDER BY number {order} LIMIT :limit"
        return self._all(query, {"owner": owner, "after": after, "limit": limit, "purpose": purpose})

    def delete_file(self, id: str, owner: str) -> bool:
        """Delete an owner's file; return False if there is none, raise InUse if an open batch needs it."""
        if self.row("files", id, owner) is None:
            return False
        users = self._all(f"SELECT id FROM batches WHERE input_file_id = ? AND {IS_OPEN}", (id,))
        if users:
            raise InUse(users[0]["id"])
        self.path(id).unlink(missing_ok=True)  # first, because on a full disk the database needs its room
        return bool(self._change(("DELETE FROM files WHERE id = ? AND owner = ?", (id, owner))))

    def add_batch(
        self, owner: str, file: str, endpoint: str, hours: int, metadata: Mapping[str, str] | None, most_open: int
    ) -> Row | None:
        """Add a batch that is to be validated; return its row, or None if its owner has `most_open` that have not ended."""
        id, now = f"batch_{uuid.uuid4().hex}", self.now()
        row = {
            "id": id, "owner": owner, "input_file_id": file, "endpoint": endpoint, "completion_window": f"{hours}h",
            "metadata": None if metadata is None else json.dumps(metadata), "status": "validating",
            "output_id": f"file-{uuid.uuid4().hex}", "error_id": f"file-{uuid.uuid4().hex}", "created_at": now,
            "expires_at": now + hours * 3600,
        }  # fmt: skip
        has_room = f"(SELECT count(*) FROM batches WHERE owner = :owner AND {IS_OPEN}) < :most_open"
        values = ", ".join(f":{name}" for name in row)
        insert = f"INSERT INTO batches ({', '.join(row)}) SELECT {values} WHERE {has_room}"
        # One statement, because others may add batches meanwhile.
        self._change((insert, {**row, "most_open": most_open}))
        return self.row("batches", id, owner)

    def due(self) -> list[Row]:
        """Return the batches that are to be cancelled, and of the others the oldest open one of each owner, oldest first."""
        oldest = f"SELECT min(number) FROM batches WHERE {IS_ACTIVE} GROUP BY owner"
        where = f"status = 'cancelling' OR number IN ({oldest})"
        return self._all(f"SELECT * FROM batches WHERE {where} ORDER BY number")

    def status(self, id: str) -> str:
        """Return the status of a batch; a batch that is gone is cancelled."""
        rows = self._all("SELECT status FROM batches WHERE id = ?", (id,))
        return str(rows[0]["status"]) if rows else "cancelled"

    def move(self, id: str, status: str, **columns: Any) -> bool:
        """Change the status of a batch that has not ended, with the time; return False if it has ended.

        A batch that is being cancelled does not go back to work.
        """
        may_move = IS_ACTIVE if status in ("in_progress", "finalizing") else IS_OPEN
        values = {f"{status}_at": self.now(), **columns, "status": status}
        setters = ", ".join(f"{name} = :{name}" for name in values)
        update = f"UPDATE batches SET {setters} WHERE id = :id AND {may_move}"
        return bool(self._change((update, {**values, "id": id})))

    def count(self, id: str, completed: int, failed: int) -> None:
        """Record how many lines of a batch have an answer."""
        self._change(("UPDATE batches SET completed = ?, failed = ? WHERE id = ?", (completed, failed, id)))

    def end(self, batch: Row, status: str) -> None:
        """End a batch; its answers and errors, where there are any, become files of its owner."""
        statements: list[tuple[str, Any]] = []
        columns: Row = {"status": status, "id": batch["id"], "now": self.now()}
        for kind in ("output", "error"):
            id, path = batch[f"{kind}_id"], self.path(batch[f"{kind}_id"])
            has_lines = path.exists() and path.stat().st_size > 0
            columns[kind] = id if has_lines else None
            if has_lines:
                name = f"{batch['id']}_{kind}.jsonl"
                size = path.stat().st_size
                statements.append(_insert_file(id, batch["owner"], name, "batch_output", size, self.now()))
            else:
                path.unlink(missing_ok=True)
        update = (
            f"UPDATE batches SET status = :status, {status}_at = :now, output_file_id = :output, error_file_id = :error "
            "WHERE id = :id"
        )
        self._change(*statements, (update, columns))

    def purge(self, before: int) -> int:
        """Delete the files and ended batches of before a time, and what failed uploads left; return how many."""
        needed = f"SELECT input_file_id FROM batches WHERE {IS_OPEN}"
        old = self._all(f"SELECT id, owner FROM files WHERE created_at < ? AND id NOT IN ({needed})", (before,))
        for row in old:
            self.delete_file(row["id"], row["owner"])
        gone = self._change((f"DELETE FROM batches WHERE created_at < ? AND NOT {IS_OPEN}", (before,)))
        for path in self._files.glob("upload-*"):
            with suppress(OSError):
                if path.stat().st_mtime < self.now() - ABANDONED_SECONDS:
                    path.unlink()
        return len(old) + gone

    def usage(self) -> tuple[int, int, dict[str, int]]:
        """Return the number and the bytes of all files, and the number of batches by status."""
        files = self._all("SELECT count(*) AS n, coalesce(sum(bytes), 0) AS bytes FROM files")[0]
        rows = self._all("SELECT status, count(*) AS n FROM batches GROUP BY status")
        return files["n"], files["bytes"], {row["status"]: row["n"] for row in rows}


def _insert_file(id: str, owner: str, filename: str, purpose: str, size: int, now: int) -> tuple[str, tuple[Any, ...]]:
    return (
        "INSERT OR IGNORE INTO files (id, owner, filename, purpose, bytes, created_at) VALUES (?, ?, ?, ?, ?, ?)",
        (id, owner, filename, purpose, size, now),
    )

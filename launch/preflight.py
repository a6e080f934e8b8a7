"""Checks before the server starts: a configuration that cannot work is rejected with value, bound and remedy.

This module must not import torch or the engine, so that errors come before anything big is loaded.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import resource
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import policies
from config import LAB_FOLDER, ROOT, Config, ConfigError
from costs import mock
from launch import banner

RESERVED_FILES = 128  # open files in addition to the connections
PROBE_BYTES = 4096
LEAST_ADDRESSES = 1 << 30  # bytes
CASES_SECONDS = 0.6  # for all cases of a policy
STARTS_SECONDS = 1.0  # more for their process, which is then ended


def check_settings(config: Config) -> None:
    """Raise ConfigError for settings that no machine could serve with."""
    policies.get_policy(config.policy, config.max_batch_size, config.policy_options)
    check_drafts(config)


def check(config: Config, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError for the first thing that would keep this configuration from working."""
    check_torch(config)
    check_port(config)
    check_open_files(config)
    check_tokenizer_file(config)
    check_lab(config)
    check_folders(environ)
    if config.batch_folder:
        check_batch_folder(Path(config.batch_folder))
    # Last, because the first cases of a policy take a moment.
    check_own_policy(config.policy, config.policy_options)


def check_drafts(config: Config) -> None:
    """Raise ConfigError if the settings for drafts cannot work."""
    mode, draft = config.speculate, config.draft_model
    if mode in ("off", "ngram") and draft:
        raise ConfigError(
            f"--draft-model is {draft!r}, but --speculate {mode} uses none. Use --speculate model or auto"
        )
    if mode == "model" and not draft:
        raise ConfigError("--speculate model needs a model: add --draft-model NAME, or use --speculate ngram")
    if draft and mock.is_mock(config.model):
        raise ConfigError(
            f"--draft-model is {draft!r}, but {config.model} has no weights whose tokens it could propose. Leave it out"
        )
    if (draft or mode not in ("off", "auto")) and policies.get_policy(
        config.policy, config.max_batch_size, config.policy_options
    ).padded:
        raise ConfigError(
            f"--speculate is {mode!r}, but the policy {config.policy} pads its batches, so that all requests compute one token "
            "per step. Use another policy such as dynamic, or --speculate off"
        )


def check_torch(config: Config) -> None:
    """Reject a model with weights where PyTorch is not installed, or cannot be loaded within `ulimit -v`."""
    if mock.is_mock(config.model):
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESSES:
        raise ConfigError(
            f"the address space of a process is limited to {limit >> 10:,} KiB, but PyTorch and a model need at least "
            f"{LEAST_ADDRESSES >> 10:,}. Run 'ulimit -v unlimited', or use --model mock:llm-mock"
        )
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "PyTorch is not installed, which every model with weights needs. Start with ./server.sh, which installs it, "
            "or use --model mock:llm-mock"
        )


def check_lab(config: Config, folder: Path = LAB_FOLDER) -> None:
    """Reject --lab where the lab has not been built."""
    if config.lab and not (folder / "index.html").is_file():
        raise ConfigError(
            f"--lab is on, but there is no lab in {folder}. Build it with dev/tools/build_lab.sh, which needs npm and about "
            "14 MB from its registry"
        )


def check_port(config: Config) -> None:
    """Reject an address that cannot be bound: gunicorn would retry five times and then exit."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {config.port} on {config.host} is in use. Stop the program that uses it, or choose "
                    f"another port: --port {config.port % 65535 + 1}"
                ) from None
            raise ConfigError(
                f"cannot listen on {config.address}: {error.strerror}. Use another --host "
                "(127.0.0.1 for this machine only) or --port"
            ) from None


def check_open_files(config: Config) -> None:
    """Raise the limit on open files to what the connections need; ConfigError when that is not allowed."""
    needed = config.connections + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        also = f" and --max-connections from {config.max_connections:,}"
        raise ConfigError(
            f"the open-file limit is {hard:,}, but {config.connections:,} connections need {needed:,}. "
            f"Run 'ulimit -n {needed}', or lower --max-queue from {config.max_queue:,}"
            + (also if config.max_connections else "")
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def check_tokenizer_file(config: Config) -> None:
    """Reject a missing tokenizer file, even if the model has its own tokenizer."""
    if config.tokenizer_file and not Path(config.tokenizer_file).is_file():
        raise ConfigError(
            f"--tokenizer-file is {config.tokenizer_file!r}, but there is no such file. "
            "Use the path of a *.tiktoken file, or leave it out"
        )


def check_folders(environ: Mapping[str, str]) -> None:
    """Reject a full disk and read-only folders: gunicorn's heartbeat and the cache need them."""
    try:
        temporary = Path(tempfile.gettempdir())
    except OSError:  # it has tried to write to all of them
        raise ConfigError(
            "cannot write to a temporary folder: the disk is full, or TMPDIR, /tmp and /var/tmp "
            "are all read-only. Free some space, or set TMPDIR to a writable folder"
        ) from None
    check_writable(temporary, "the temporary folder", "TMPDIR")
    if chosen := environ.get("EB_CACHE_DIR"):
        check_writable(Path(chosen), "the cache folder", "EB_CACHE_DIR")


def check_batch_folder(folder: Path) -> None:
    """Reject a folder of batches that cannot be written, or whose database cannot be read."""
    for each in (folder, folder / "files"):
        check_writable(each, "the folder of batches", "--batch-folder")
    database = folder / "batches.sqlite"
    if database.exists():
        try:
            with contextlib.closing(sqlite3.connect(database)) as connection:
                connection.execute("PRAGMA schema_version")
        except sqlite3.Error as error:
            raise ConfigError(
                f"cannot read the database of batches {database}: {error}. Restore it from a backup, or set --batch-folder "
                "to another folder"
            ) from None


def check_writable(folder: Path, what: str, variable: str) -> None:
    """Raise ConfigError unless a small file can be written in `folder`, which is created if it is missing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
    except OSError as error:
        raise ConfigError(
            f"cannot write to {what} {folder}: {error.strerror}. "
            f"Set {variable} to a writable folder, or free some space"
        ) from None


def check_own_policy(name: str, options: Mapping[str, object] | None = None) -> None:
    """Warn of what the first cases of the law checker find wrong with a policy that is not one of this project.

    A hook with the wrong arguments would end the server at its first request, and a policy that admits none would let all
    requests wait. The checker runs in a process of its own, which is started by name: the server imports nothing of the
    laboratory.
    """
    if "." not in name:  # as no file or module of a user's own is named
        return
    words = [
        sys.executable,
        "-m",
        "simulate.laws.first",
        policies.absolute(name),
        str(CASES_SECONDS),
        json.dumps(options),
    ]
    limit = CASES_SECONDS + STARTS_SECONDS
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=limit, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return
    if result.stdout:
        banner.warn(f"{result.stdout}. The server starts all the same. Test it with ./eb simulate check {name}")

"""What `./server.sh` runs: check the settings, find the model, and become gunicorn.

Gunicorn imports the app again in a new process, so this module loads neither Flask nor the API, nor what only some
settings need. It searches for a model only if that model has weights.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import config as settings
import policies
from config import RESOLVED, Config, ConfigError
from costs import mock
from launch import banner, plugin, preflight
from terminal.shell import printing

PROCESS = {
    # Otherwise glibc gives each thread its own heap, which never shrinks below its largest request.
    "MALLOC_ARENA_MAX": "2",
    # Otherwise macOS ends a process that gunicorn has forked when it first looks for a proxy.
    "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",
}
NO_POLICY = (
    "no policy was named, so this serves nobatch, one request at a time, as the original did. "
    "./server.sh dynamic batches requests"
)


def main(argv: list[str] | None = None) -> None:
    """Print the settings, examine this machine, or become the server, as the command line says."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        known = {name: policies.summary(name) for name in policies.names()}
        words = sys.argv[1:] if argv is None else argv
        loaded = _with_named_model(settings.load(words, policies=known, orders=policies.order_names()))
        preflight.check_settings(loaded.config)
        if loaded.task == "print-config":
            with printing():
                print(_described(loaded))  # noqa: T201
            return
        for warning in loaded.warnings:
            banner.warn(warning)
        _warn_of_plugin()
        config = with_absolute_paths(loaded.config)
        if loaded.task == "doctor":
            from launch import doctor

            raise SystemExit(0 if doctor.examine(config) else 1)
        preflight.check(config)
        # A download must take its unfinished files and pip with it: until gunicorn comes, SIGTERM would leave both.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        resolved = _resolve(config)
    except (ValueError, OSError) as error:
        banner.fail(str(error))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        banner.fail("stopped before the model was found. Start again to serve it")
        raise SystemExit(130) from None
    if loaded.origin["policy"] == "default":
        banner.note(NO_POLICY)
    _become_gunicorn({**config.to_environment(), RESOLVED: resolved, "BATCHING": config.policy})


def _with_named_model(loaded: settings.Loaded) -> settings.Loaded:
    """Return the settings to serve a model with dynamic, if the command line names one in the place of the policy."""
    word = loaded.config.policy
    if loaded.origin["policy"] != "flag" or word in policies.names():
        return loaded
    from models.sources import catalog

    if word not in catalog.NAMES and not mock.is_mock(word):
        try:
            policies.check_name(word)
        except ValueError:
            hint = settings.nearest(word, catalog.NAMES)
            if hint and not settings.nearest(word, policies.names()):
                raise ConfigError(f"unknown policy or model {word!r}.{hint} ./server.sh --help lists both") from None
        return loaded
    if loaded.origin["model"] == "flag":
        other = loaded.config.model
        raise ConfigError(
            f"{word!r} and --model {other!r} both name a model. Use one of them: ./server.sh {word}, or "
            f"./server.sh dynamic --model {other}"
        )
    return dataclasses.replace(
        loaded,
        config=dataclasses.replace(loaded.config, policy="dynamic", model=word),
        origin={**loaded.origin, "model": "flag"},
    )


def _become_gunicorn(variables: Mapping[str, str]) -> None:
    """Replace this process by gunicorn, with these variables beside those of the environment."""
    os.chdir(settings.ROOT)
    command = [sys.executable, "-m", "gunicorn", "--config", f"{settings.ROOT}/launch/gunicorn_conf.py", "app:app"]
    sys.stderr.flush()
    # A Ctrl-C while Python starts again waits until gunicorn handles it, in `when_ready`.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        os.execve(sys.executable, command, {**PROCESS, **os.environ, **variables})
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _warn_of_plugin() -> None:
    """Reject a plugin that cannot be read, and warn of one that changes anything."""
    if armed := plugin.read(os.environ).armed:
        banner.warn(f"{plugin.VARIABLE} arms faults: {', '.join(armed)}. Unset it to serve")


def _resolve(config: Config) -> str:
    """Find the model, with a note if that takes over a second; return its description for the worker."""
    if mock.is_mock(config.model):
        mock.load(config.model)  # the worker loads it again; this reports its errors in time
        for name in ("dtype", "quantize", "kv_dtype", "batch_invariant"):
            if (value := getattr(config, name)) != getattr(Config, name):
                flag = f"{settings.flag(name)} {settings.text_of(value)}"
                banner.warn(f"{flag} has no effect on {config.model}, which has no weights. Leave it out")
        return ""
    from models.sources import catalog

    name = config.model or catalog.DEFAULT
    timer = threading.Timer(1.0, lambda: banner.note(f"looking for {name} on the model hub ..."))
    if catalog.is_on_hub(name):
        timer.start()
    try:
        if config.draft_model:  # the worker finds it again; this reports its errors in time
            catalog.resolve(config.draft_model, config.load_format)
        return catalog.resolve(config.model or None, config.load_format).to_json()
    finally:
        timer.cancel()


def _described(loaded: settings.Loaded) -> str:
    """Return every setting with its value and origin, secrets hidden."""
    lines = []
    for item in dataclasses.fields(Config):
        value = getattr(loaded.config, item.name)
        shown = "(set)" if item.metadata["type"] is settings.KEY and value else settings.text_of(value) or "(unset)"
        lines.append(f"{settings.flag(item.name):<23} {shown:<23} {loaded.origin[item.name]}")
    return "\n".join(lines)


def with_absolute_paths(config: Config) -> Config:
    """Return the settings with absolute paths, since gunicorn runs in the folder of this file."""

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute()) if path else ""

    draft = config.draft_model
    return dataclasses.replace(
        config,
        tokenizer_file=absolute(config.tokenizer_file),
        pinned_prefixes=absolute(config.pinned_prefixes),
        model=mock.absolute(config.model) if mock.is_mock(config.model) else config.model,
        draft_model=absolute(draft) if Path(draft).expanduser().exists() else draft,
        policy=policies.absolute(config.policy),
    )

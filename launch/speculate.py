"""Check the settings for drafts before anything big is loaded. Part of the composition root."""

from __future__ import annotations

from pathlib import Path

import policies
from config import Config, ConfigError
from costs import mock


def check(config: Config) -> None:
    """Raise ConfigError if the settings for drafts cannot work."""
    mode, draft = config.speculate, config.draft_model
    if mode == "off" and draft:
        raise ConfigError(f"--draft-model is {draft!r}, but --speculate is off. Add --speculate model, or leave it out")
    if mode == "ngram" and draft:
        raise ConfigError(
            f"--draft-model is {draft!r}, but --speculate ngram needs none. Use --speculate model or auto"
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


def absolute(draft: str) -> str:
    """Return a draft model's name that means the same in any folder."""
    path = Path(draft).expanduser()
    return str(path.absolute()) if draft and path.exists() else draft

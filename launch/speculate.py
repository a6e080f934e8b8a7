"""Make what guesses tokens, from the settings. Part of the composition root."""

from __future__ import annotations

from config import Config, ConfigError
from scheduling.speculation import Speculator


def make_speculator(config: Config, device: str) -> Speculator | None:
    """Return the configured speculator, None where there is none; ConfigError where the device's runner takes no drafts."""
    if config.speculate == "off" or config.drafts == "0":
        return None
    if device.startswith("cuda"):
        raise ConfigError(f"--speculate is {config.speculate!r}, which works on CPUs only for now. Set it to off")
    from generate.drafters.ngram import NgramDrafter

    return Speculator(NgramDrafter(), None if config.drafts == "auto" else int(config.drafts))

"""Mistral: Llama with a sliding window (Jiang et al., 2023). Families with windows in some layers build on this one."""

from collections.abc import Iterable
from typing import Any

from models.architecture import Architecture
from models.families.llama import INTERLEAVED, LAYOUT, sizes
from models.family import GGUF, KEYS, Config, ConfigError, Family

WINDOW = 4096  # what transformers takes for a missing sliding_window; null means none
WINDOWED = {**KEYS, "sliding_window": "attention.sliding_window"}  # keys of GGUF files
KINDS = ("full_attention", "sliding_attention")


def read(config: Config) -> Architecture:
    """Read a MistralConfig."""
    shape = sizes(config)
    return Architecture(family="mistral", **shape, **windows(config, shape, range(shape["n_layer"])))


def windows(
    config: Config, shape: dict[str, Any], layers: Iterable[int], kinds: Any = None, used: bool = True
) -> dict[str, Any]:
    """Return the window of `layers`, or of those that `kinds` of all layers name, as arguments of Architecture."""
    default = None if "sliding_window" in config.raw else WINDOW
    used = config.take("sliding_window", default=default) is not None and used
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != shape["n_layer"] or not {*kinds} <= {*KINDS[: 1 + used]}:
            allowed = " or ".join(KINDS[: 1 + used])
            raise ConfigError(
                f"sets layer_types to something other than {allowed} for each layer. Use its own config.json"
            )
        layers = [layer for layer, kind in enumerate(kinds) if kind == KINDS[1]]
    return {"window": config.size("sliding_window", default=WINDOW), "windowed": frozenset(layers)} if used else {}


FORM = GGUF("llama", "mistral", INTERLEAVED, WINDOWED, needs="attention.sliding_window")
FAMILY = Family(("mistral",), read, LAYOUT, (FORM,))

"""What may be put around the engine's parts for a test: nothing, or what a module makes that EB_PLUGIN names.

The variable holds the module's name, a space, and a text that its function `read` gets.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TextIO

VARIABLE = "EB_PLUGIN"


class Plugin:
    """Leaves all parts as they are; a module's `read` returns an object with these attributes."""

    armed: list[str] = []  # what a warning at startup names
    stall_seconds: float | None = None  # without a step, after which the loop counts as hung

    def load(self) -> None:
        """Act before the model is loaded."""

    def model(self, model: Any, decode: Callable[[list[int]], str]) -> Any:
        """Return the model; `decode` returns the text of a prompt."""
        return model

    def maker(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return what makes inferences."""
        return make

    def observers(self) -> list[Callable[..., None]]:
        """Return more observers of the loop."""
        return []

    def stream(self, stream: TextIO) -> Any:
        """Return the stream that a log writes to."""
        return stream


def read(environ: Mapping[str, str]) -> Any:
    """Return the plugin of an environment; ValueError for a module that is not there."""
    name, _, text = environ.get(VARIABLE, "").partition(" ")
    try:
        return importlib.import_module(name).read(text) if name else Plugin()
    except ImportError as error:
        raise ValueError(f"{VARIABLE} is {name!r}, but it cannot be imported: {error}. Unset it") from None

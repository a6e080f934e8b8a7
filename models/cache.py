"""Where this project keeps what it compiled or downloaded. It must not know what that is."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path | None:
    """Return the folder to keep things in: $EB_CACHE_DIR, or effective-batching in the user's cache, if any."""
    if chosen := os.environ.get("EB_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "effective-batching"
    except RuntimeError:
        # A user without a home, as in some containers. A fixed name in the temporary directory is no alternative:
        # another user could create it first and choose the code that is loaded.
        return None

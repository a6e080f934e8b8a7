"""A model that was found: what `models/sources/catalog.py` returns and `models/weights.py` loads.

It is apart from the catalog because a server's worker and a tokenizer need it, but none of the libraries with which
models are found.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models import families
from models.architecture import Architecture

BARD = Path(__file__).resolve().parents[2] / "weights" / "bard"  # the built-in model


@dataclass(frozen=True)
class ResolvedModel:
    """The model to serve: `config` is its config.json, also where it comes from a GGUF file.

    `path` is the folder or GGUF file with the weights, None for random ones; `tokenizer` is the same for its tokenizer,
    None for GPT-2's ranks. `requested` is the user's choice (None for the default). `warning` is set when another model
    is served instead.
    """

    name: str
    requested: str | None
    load_format: str
    path: Path | None
    revision: str | None
    config: dict[str, Any]
    tokenizer: Path | None
    warning: str | None = None

    @property
    def architecture(self) -> Architecture:
        """What the engine computes for this model."""
        return families.architecture_of(self.config)

    @property
    def trained_dtype(self) -> str | None:
        """The number format that its config.json names, such as "bfloat16"; transformers 4 calls it torch_dtype."""
        name = self.config.get("dtype") or self.config.get("torch_dtype")
        return name if isinstance(name, str) else None

    def to_json(self) -> str:
        """Return a text for `from_json`: the launcher resolves once and passes the result to its workers."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> ResolvedModel:
        """Return the model that `to_json` wrote."""
        fields = json.loads(text)
        for name in ("path", "tokenizer"):
            fields[name] = fields[name] and Path(fields[name])
        return cls(**fields)

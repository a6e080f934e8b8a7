"""The families of models that can be served: one file each, found by looking into this folder.

A family is a `Family` under the name FAMILY. Nothing here imports torch: the launcher describes a model before it
loads one.
"""

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from models.architecture import Architecture
from models.family import GGUF, Config, ConfigError, Family, shortened

# What no family here computes, by the setting of a config.json that turns it on.
OUT_OF_SCOPE = {
    "vision_config": "a vision tower", "audio_config": "an audio tower", "kv_lora_rank": "multi-head latent attention",
    "mamba_d_state": "state space layers", "state_size": "state space layers", "num_experts": "experts",
    "linear_num_value_heads": "linear attention", "num_local_experts": "experts",
}  # fmt: skip


@functools.cache
def by_model_type() -> dict[str, Family]:
    """Return the family of each `model_type`, reading all files of this folder once."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    families = [importlib.import_module(f"{__name__}.{name}").FAMILY for name in names]
    return {model_type: family for family in families for model_type in family.model_types}


def gguf_forms() -> list[GGUF]:
    """Return all forms of GGUF files, those first that need something."""
    forms = [form for name, family in by_model_type().items() for form in family.gguf if form.model_type == name]
    return sorted(forms, key=lambda form: not form.needs)


def family_of(raw: Mapping[str, Any]) -> Family:
    """Return the family of a model by its config.json. Raises ConfigError."""
    model_type = raw.get("model_type")
    family = by_model_type().get(model_type) if isinstance(model_type, str) else None
    if family is None:
        missing = model_type is None
        what = "has no model_type" if missing else f"has model_type {shortened(model_type)}, which is not supported"
        what += next((f" ({key} sets {part})" for key, part in OUT_OF_SCOPE.items() if raw.get(key)), "")
        raise ConfigError(f"{what}. Use a model of type {', '.join(by_model_type())}")
    return family


def architecture_of(raw: Mapping[str, Any]) -> Architecture:
    """Return what the engine computes for the model of this config.json.

    Raises ConfigError for sizes that do not fit and for each switch that is on and has no meaning here.
    """
    config = Config(raw)
    architecture = family_of(raw).read(config)
    config.refuse_rest()
    return architecture

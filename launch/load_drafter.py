"""Make the drafter, from the settings. Part of the composition root.

Torch is imported inside the function that loads a model.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import policies
from api.service import Parts
from config import Config, ConfigError
from costs.drafting import DrawnDrafter
from costs.mock import MockModel
from launch.load_model import tokenizer_of
from scheduling.speculation import Drafter, Speculator

if TYPE_CHECKING:
    from generate.drafters.model import ModelDrafter

KV_SHARE = 0.25  # of the free memory that the keys and values of a draft model may take


def make_speculator(config: Config, parts: Parts) -> Speculator | None:
    """Return the configured speculator, None where there is none; ConfigError for a draft model that cannot be used."""
    if not _has_drafts(config, parts):
        return None
    from generate.drafters.forced import ForcedDrafter
    from generate.drafters.guarded import GuardedDrafter

    if config.draft_model and parts.device.startswith("cuda"):
        raise ConfigError(
            f"--draft-model is {config.draft_model!r}, but draft models run on CPUs only. Use --speculate ngram"
        )
    return Speculator(
        GuardedDrafter(ForcedDrafter(make_drafter(config, parts))),
        None if config.drafts == "auto" else int(config.drafts),
        time.perf_counter,
    )


def _has_drafts(config: Config, parts: Parts) -> bool:
    """Return whether there may be draft tokens; `auto` has none where it was not shown that they cost nothing."""
    if config.speculate != "auto" or config.draft_model or config.drafts == "0":
        return config.speculate != "off" and config.drafts != "0"
    if isinstance(parts.model, MockModel):
        return config.mock_acceptance > 0
    policy = policies.get_policy(config.policy, config.max_batch_size, config.policy_options)
    return not policy.padded and not parts.device.startswith("cuda")


def make_drafter(config: Config, parts: Parts) -> Drafter:
    """Return the configured drafter; of a mock model always one whose draft tokens are accepted as often as configured."""
    if isinstance(parts.model, MockModel):
        return DrawnDrafter(config.mock_acceptance, tokens=parts.model.token)
    from generate.drafters.ngram import NgramDrafter

    return load_draft_model(config, parts) if config.draft_model else NgramDrafter()


def load_draft_model(config: Config, parts: Parts) -> ModelDrafter:
    """Load the draft model; ConfigError if its tokens are not those of the served model."""
    import torch

    from generate import machine
    from generate.drafters.model import ModelDrafter
    from generate.quantize import AS_STORED, NONE
    from generate.runner import ModelRunner
    from models import weights
    from models.sources import catalog

    resolved = catalog.resolve(config.draft_model, config.load_format)
    _check_tokens(parts.tokenizer, tokenizer_of(config, resolved), config.draft_model, parts.model_name)
    network = weights.load(resolved, parts.dtype)
    shape, device = network.config, network.head.device
    kv_dtype = machine.choose_kv_dtype(config.kv_dtype, network.head.dtype, device)
    context = min(parts.context, shape.block_size)
    page = machine.bytes_per_token(shape, kv_dtype) * machine.PAGE_SIZE
    wanted = config.max_batch_size * -(-context // machine.PAGE_SIZE)
    pages = max(2, min(parts.n_pages, wanted, int(machine.free_memory(torch.device("cpu")) * KV_SHARE) // page))
    quantize = NONE if config.quantize == AS_STORED else config.quantize
    runner = ModelRunner(network, pages, machine.PAGE_SIZE, kv_dtype, quantize)
    return ModelDrafter(runner, pages, context)


def _check_tokens(served: object, draft: object, name: str, model: str) -> None:
    """Raise ConfigError unless each id means the same to both models."""
    ours, theirs = (tokenizer.vocabulary.pieces for tokenizer in (served, draft))  # type: ignore[attr-defined]
    if ours != theirs:
        differ = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        raise ConfigError(
            f"--draft-model is {name!r} with {len(theirs):,} tokens, which differ from the {len(ours):,} of {model} from "
            f"token {differ:,} on. Use a smaller model of the same family, or --speculate ngram"
        )

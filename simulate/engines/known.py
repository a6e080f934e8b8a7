"""The servers whose schedulers are known: a policy file, usual settings, and how their users set each of them.

It must not know logs or URLs: what they say of a server comes as a mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import policies
from scheduling.options import Option, nearest, options_of
from simulate.scenario import Chosen, EngineSize

SETTINGS = {  # of an engine: what they are, and the least value
    "slots": ("requests computed together", 1), "tokens_per_step": ("tokens computed in a step", 1),
    "kv_tokens": ("tokens that the KV memory holds; 0: no limit", 0), "page_size": ("tokens of a KV page", 1),
    "prefix_cache": ("share the KV of equal beginnings", None),
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A server's scheduler. Of its KV pages, `spare_pages` are never used. A setting without a flag cannot be changed."""

    name: str
    title: str
    policy: Chosen
    engine: EngineSize
    spare_pages: int = 0
    flags: Mapping[str, str] = field(default_factory=dict)

    def serve(self, facts: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Chosen, EngineSize, dict[str, str]]:
        """Return policy, engine, and where each setting is from: "option" (`given`), "log" (`facts`) or "usual".

        Settings are those of an engine and the options of the policy; `kv_tokens` counts spare pages, but not in the result.
        Raise ValueError for a wrong setting in `given`; one in `facts` counts as missing.
        """
        name, values, sources = self.policy.name, {}, {}
        given = {key: value for key, value in given.items() if value is not None}
        if self.name == "ours":
            with suppress(ValueError):
                policies.check_name(str(facts.get("policy")), own=False)  # a log must not name a file to be run
                name = str(facts["policy"])
            served = facts.get("policy_options")
            facts = {**facts, **(served if isinstance(served, Mapping) else {})}
        settings = {key: Option(getattr(self.engine, key), *about) for key, about in SETTINGS.items()}
        options = {key: value for key, value in given.items() if key not in settings}
        of_policy = options_of(type(Chosen(name, options).policy(1)))  # which refuses options that it does not have
        for key, option in {**settings, **of_policy}.items():
            values[key], sources[key] = option.default, "usual"
            with suppress(ValueError):
                if key in facts:
                    values[key], sources[key] = option.read(key, facts[key]), "log"
            if key in given:
                values[key], sources[key] = option.read(key, given[key]), "option"
        if values["kv_tokens"]:
            size = values["page_size"]
            values["kv_tokens"] = max(size, values["kv_tokens"] - self.spare_pages * size)
        engine = replace(self.engine, **{key: values[key] for key in settings})
        return Chosen(name, {key: values[key] for key in of_policy}), engine, sources


VLLM = Kind("vllm", "vLLM", Chosen("simulate.engines.vllm"), EngineSize(256), 1, {
    "slots": "--max-num-seqs {}", "tokens_per_step": "--max-num-batched-tokens {}",
    "prefix_cache": "--enable-prefix-caching", "order:priority": "--scheduling-policy priority",
    "loop": "./eb vllm serve MODEL --policy {}",
})  # fmt: skip
SGLANG = Kind("sglang", "SGLang", Chosen("simulate.engines.sglang"), EngineSize(2048, 8192), 0, {
    "slots": "--max-running-requests {}", "tokens_per_step": "--chunked-prefill-size {}",
    "kv_tokens": "--max-total-tokens {}", "conservativeness": "--schedule-conservativeness {}", "order:lpm": "--schedule-policy lpm",
    "order:priority": "--enable-priority-scheduling",
})  # fmt: skip
# tools/server/server-context.cpp, `update_slots`: all decodes, then prompts up to n_batch; a request keeps its slot, and room
# for its whole answer, to its end. A prompt finds any beginning in memory here, and only that of its slot's last one there.
LLAMA = Kind("llama.cpp", "llama.cpp", Chosen("dynamic"), EngineSize(4), 0, {
    "slots": "--parallel {}", "tokens_per_step": "--batch-size {}", "kv_tokens": "--ctx-size {}",
})  # fmt: skip
# backends/v3/src/backend.rs, `batching_task`, and queue.rs, `next_batch`: room for prompt and answer, and decodes pause.
TGI = Kind("tgi", "TGI", Chosen("tgi"), EngineSize(128, 4096), 0, {
    "slots": "--max-batch-size {}", "tokens_per_step": "--max-batch-prefill-tokens {}",
    "kv_tokens": "--max-batch-total-tokens {}", "ratio": "--waiting-served-ratio {}", "max_waiting": "--max-waiting-tokens {}",
})  # fmt: skip
# "Useful Runtime Options" in the documents of TensorRT-LLM 1.0, with its defaults but for chunked prompts: with guaranteed_no_evict
# a request joins with room for its whole answer.
TRITON = Kind("triton", "Triton", Chosen("dynamic"), EngineSize(256, 8192, 0, 32, False), 0, {
    "slots": "max_batch_size: {}", "tokens_per_step": "max_num_tokens: {}", "kv_tokens": "max_tokens_in_paged_kv_cache: {}",
})  # fmt: skip
OURS = Kind("ours", "effective-batching", Chosen("dynamic"), EngineSize(64), 0, {
    "slots": "--max-batch-size {}", "tokens_per_step": "--max-tokens-per-step {}", "policy": "./server.sh {}",
})  # fmt: skip
KINDS = {kind.name: kind for kind in (VLLM, SGLANG, LLAMA, TGI, TRITON, OURS)}


def names() -> list[str]:
    """Return the names of all kinds."""
    return list(KINDS)


def get(name: str) -> Kind:
    """Return the kind of this name; ValueError if there is none."""
    if name not in KINDS:
        raise ValueError(f"unknown engine {name!r}.{nearest(name, KINDS)} Use one of: {', '.join(KINDS)}")
    return KINDS[name]

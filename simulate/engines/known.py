"""The servers whose schedulers are known: a policy file, usual settings, and how their users set each of them.

It must not know logs or URLs: what they say of a server comes as a mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import policies
from scheduling.options import Option, nearest, options_of
from simulate.scenario import Chosen, Engine

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
    engine: Engine
    spare_pages: int = 0
    flags: Mapping[str, str] = field(default_factory=dict)

    def serve(self, facts: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Chosen, Engine, dict[str, str]]:
        """Return policy, engine, and where each setting is from: "option" (`given`), "log" (`facts`) or "usual".

        Settings are those of an engine and the options of the policy; `kv_tokens` counts spare pages, but not in the result.
        Raise ValueError for a wrong setting in `given`; one in `facts` counts as missing.
        """
        sources: dict[str, str] = {}

        def choose(key: str, read: Callable[[str, Any], Any], usual: Any) -> Any:
            sources[key] = "option"
            if given.get(key) is not None:
                return read(key, given[key])
            with suppress(ValueError):
                if facts.get(key) is not None:
                    sources[key] = "log"
                    return read(key, facts[key])
            sources[key] = "usual"
            return usual

        def loop(key: str, value: Any) -> str:
            policies.check_name(str(value), own=value == given.get(key))  # a log must not name a file to be run
            return str(value)

        name = self.policy.name
        if self.name == "ours":
            name = choose("policy", loop, name)
            served = facts.get("policy_options")
            facts = {**facts, **(served if isinstance(served, Mapping) else {})}
        usual = {key: getattr(self.engine, key) for key in SETTINGS}
        values = {key: choose(key, Option(usual[key], *about).read, usual[key]) for key, about in SETTINGS.items()}
        if values["kv_tokens"]:
            size = values["page_size"]
            values["kv_tokens"] = max(size, values["kv_tokens"] - self.spare_pages * size)
        options = {
            key: choose(key, option.read, self.policy.options.get(key, option.default))
            for key, option in options_of(type(Chosen(name).policy(1))).items()
        }
        return Chosen(name, options), replace(self.engine, **values), sources


VLLM = Kind("vllm", "vLLM", Chosen("simulate.engines.vllm"), Engine(256), 1, {
    "slots": "--max-num-seqs {}", "tokens_per_step": "--max-num-batched-tokens {}",
    "prefix_cache": "--enable-prefix-caching", "order:priority": "--scheduling-policy priority",
})  # fmt: skip
SGLANG = Kind("sglang", "SGLang", Chosen("simulate.engines.sglang"), Engine(2048, 8192), 0, {
    "slots": "--max-running-requests {}", "tokens_per_step": "--chunked-prefill-size {}",
    "kv_tokens": "--max-total-tokens {}", "conservativeness": "--schedule-conservativeness {}",
    "order:lpm": "--schedule-policy lpm", "order:priority": "--enable-priority-scheduling",
})  # fmt: skip
# tools/server/server-context.cpp, `update_slots`: all decodes, then prompts up to n_batch; a request keeps its slot, and room
# for its whole answer, to its end. A prompt finds any beginning in memory here, and only that of its slot's last one there.
LLAMA = Kind("llama.cpp", "llama.cpp", Chosen("dynamic"), Engine(4), 0, {
    "slots": "--parallel {}", "tokens_per_step": "--batch-size {}", "kv_tokens": "--ctx-size {}",
})  # fmt: skip
# backends/v3/src/backend.rs, `batching_task`, and queue.rs, `next_batch`: room for prompt and answer, and decodes pause.
TGI = Kind("tgi", "TGI", Chosen("tgi"), Engine(128, 4096), 0, {
    "slots": "--max-batch-size {}", "tokens_per_step": "--max-batch-prefill-tokens {}",
    "kv_tokens": "--max-batch-total-tokens {}", "ratio": "--waiting-served-ratio {}", "max_waiting": "--max-waiting-tokens {}",
})  # fmt: skip
TRITON = Kind("triton", "Triton", Chosen("simulate.engines.triton"), Engine(256, 8192, 0, 32, False), 0, {
    "slots": "max_batch_size: {}", "tokens_per_step": "max_num_tokens: {}", "capacity": "batch_scheduler_policy: {}",
    "kv_tokens": "max_tokens_in_paged_kv_cache: {}", "chunked_context": "enable_chunked_context: {}",
})  # fmt: skip
OURS = Kind("ours", "effective-batching", Chosen("dynamic"), Engine(64), 0, {
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

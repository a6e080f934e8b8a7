"""What the server at a URL says of itself: which engine it is, and its settings. It sends GET requests alone.

It must not know what the settings are good for, or which values are possible.
"""

from __future__ import annotations

import re
from typing import Any

from ..places import find
from .sse import read_json
from .target import Target

SGLANG = {
    "slots": "max_running_requests|internal_states/0/effective_max_running_requests_per_dp",
    "tokens_per_step": "chunked_prefill_size", "kv_tokens": "max_total_num_tokens", "prefix_cache": "!disable_radix_cache",
    "overlap": "!disable_overlap_schedule", "conservativeness": "schedule_conservativeness", "version": "version",
}  # fmt: skip
# Engine, path, what shows that it is this engine ("": asked only if it is), and where in the answer settings are.
ENGINES: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("ours", "/stats", '"max_batch_size"', {
        "slots": "engine/max_batch_size", "tokens_per_step": "engine/max_tokens_per_step", "policy": "policy",
        "policy_options": "engine/policy_options", "kv_tokens": "engine/kv/pages_total*engine/kv/page_size",
        "page_size": "engine/kv/page_size", "model": "engine/model"}),
    ("vllm", "/metrics", "vllm:cache_config_info{", {
        "kv_tokens": "num_gpu_blocks*block_size", "page_size": "block_size", "prefix_cache": "enable_prefix_caching"}),
    # Where VLLM_SERVER_DEV_MODE is set.
    ("vllm", "/server_info?config_format=json", "", {"slots": "vllm_config/scheduler_config/max_num_seqs"}),
    ("vllm", "/version", "", {"version": "version"}),
    ("vllm", "/v1/models", "", {"model": "data/0/id", "context": "data/0/max_model_len"}),
    ("sglang", "/server_info", '"max_total_num_tokens"', SGLANG),
    ("sglang", "/get_server_info", '"max_total_num_tokens"', SGLANG),
    ("llama.cpp", "/props", '"total_slots"', {
        "slots": "total_slots", "kv_tokens": "total_slots*default_generation_settings/n_ctx", "version": "build_info"}),
    ("tgi", "/info", '"max_batch_total_tokens"', {
        "slots": "max_batch_size", "tokens_per_step": "max_batch_prefill_tokens", "kv_tokens": "max_batch_total_tokens",
        "ratio": "waiting_served_ratio", "max_waiting": "max_waiting_tokens", "model": "model_id", "version": "version"}),
    ("triton", "/v2", '"triton"', {"version": "version"}),
)  # fmt: skip


def facts(url: str, api_key: str | None = None, timeout: float = 5.0) -> dict[str, Any]:
    """Return the engine and its settings, named as in `simulate.logs.log.Log.server`, as far as it reports them.

    `asked` lists the requests and how each went; of a server that is not known, it is all. Redirects are not followed.
    """
    target = Target(url.rstrip("/").removesuffix("/v1"), api_key=api_key)
    found: dict[str, Any] = {"asked": []}
    for engine, path, sign, places in ENGINES:
        if found.get("engine", "") != ("" if sign else engine):
            continue
        try:
            with target.session() as session:
                reply = session.get(target.url + path, timeout=timeout, allow_redirects=False)
            how, body = f"HTTP {reply.status_code}", reply.text if reply.status_code == 200 else ""
        except (OSError, ValueError) as error:  # of `requests`, too
            how, body = type(error).__name__, ""
        found["asked"].append(f"GET {target.url}{path}: {how}")
        answer = _parsed(body, sign) if sign in body else None
        values = {key: value for key, place in places.items() if (value := find(answer, place)) is not None}
        found |= {"engine": engine, **values} if values else {}
        if not how.startswith("HTTP"):
            break
    return found


def _parsed(body: str, metric: str) -> Any:
    """Return the JSON of a body, or the labels of a metric; None if there is neither."""
    if metric.endswith("{"):
        return dict(re.findall(r'(\w+)="([^"]*)"', body[body.index(metric) :].partition("\n")[0]))
    return read_json(body)

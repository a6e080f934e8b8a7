"""What the server at a URL says of itself: which engine it is, and its settings. It sends GET requests alone.

It must not know what the settings are good for, or which values are possible.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

from client.send.target import Target

MOST = 4 << 20  # bytes of an answer that are read
SGLANG = {
    "slots": "max_running_requests|internal_states.0.effective_max_running_requests_per_dp",
    "tokens_per_step": "chunked_prefill_size", "kv_tokens": "max_total_num_tokens", "prefix_cache": "!disable_radix_cache",
    "overlap": "!disable_overlap_schedule", "conservativeness": "schedule_conservativeness", "version": "version",
}  # fmt: skip
# Engine, what its answer to the first path has in it, and where in the answers settings are: a|b is b without a, a*b a product.
ENGINES: tuple[tuple[str, str, dict[str, dict[str, str]]], ...] = (
    ("ours", '"max_batch_size"', {"/stats": {
        "slots": "engine.max_batch_size", "tokens_per_step": "engine.max_tokens_per_step", "policy": "policy",
        "policy_options": "engine.policy_options", "kv_tokens": "engine.kv.pages_total*engine.kv.page_size",
        "page_size": "engine.kv.page_size", "model": "engine.model"}}),
    ("vllm", "vllm:cache_config_info{", {"/metrics": {
        "kv_tokens": "num_gpu_blocks*block_size", "page_size": "block_size", "prefix_cache": "enable_prefix_caching"},
        "/version": {"version": "version"}, "/v1/models": {"model": "data.0.id", "context": "data.0.max_model_len"}}),
    ("sglang", '"max_total_num_tokens"', {"/server_info": SGLANG}),
    ("sglang", '"max_total_num_tokens"', {"/get_server_info": SGLANG}),
    ("llama.cpp", '"total_slots"', {"/props": {
        "slots": "total_slots", "kv_tokens": "total_slots*default_generation_settings.n_ctx", "version": "build_info"}}),
    ("tgi", '"max_batch_total_tokens"', {"/info": {
        "slots": "max_batch_size", "tokens_per_step": "max_batch_prefill_tokens", "kv_tokens": "max_batch_total_tokens",
        "ratio": "waiting_served_ratio", "max_waiting": "max_waiting_tokens", "model": "model_id", "version": "version"}}),
    ("triton", "nv_trt_llm_kv_cache_block_metrics{", {"/metrics": {
        "kv_tokens": "max*tokens_per", "page_size": "tokens_per"}}),
    ("triton", '"triton"', {"/v2": {"version": "version"}}),
)  # fmt: skip


def facts(url: str, api_key: str | None = None, timeout: float = 5.0) -> dict[str, Any]:
    """Return the engine and its settings, named as in `simulate.logs.log.Reading.server`, as far as it reports them.

    `asked` lists the requests and how each went; of a server that is not known, it is all. A request takes at most about
    `timeout` seconds. Redirects are not followed.
    """
    target, asked, bodies = Target(url.rstrip("/").removesuffix("/v1"), api_key=api_key), [], {}
    for engine, sign, paths in ENGINES:
        found: dict[str, Any] = {}
        for path, places in paths.items():
            if path not in bodies:
                how, bodies[path] = _fetch(target, path, timeout)
                asked.append(f"GET {target.url}{path}: {how}")
                if how.startswith("Connect") and len(asked) == 1:  # nothing answers there
                    return {"asked": asked}
            if not found and sign not in bodies[path]:
                break
            answer = _parsed(bodies[path], sign)
            values = {key: _value(answer, place) for key, place in places.items()}
            found |= {key: value for key, value in values.items() if value is not None}
        if found:
            return {"engine": engine, **found, "asked": asked}
    return {"asked": asked}


def _fetch(target: Target, path: str, timeout: float) -> tuple[str, str]:
    """Return what came of a request, and the body, which is empty unless the status is 200."""
    body, end = b"", time.monotonic() + timeout
    try:
        with target.session() as session:
            answer = session.get(target.url + path, timeout=timeout, stream=True, allow_redirects=False)
            while piece := answer.raw.read1(MOST):  # what has come, so that a slow answer is noticed
                body += piece
                if len(body) > MOST or time.monotonic() > end:
                    return ("more than 4 MB" if len(body) > MOST else f"not complete after {timeout:g} s"), ""
    except Exception as error:  # each layer below raises errors of its own
        return type(error).__name__, ""
    return f"HTTP {answer.status_code}", body.decode("utf-8", "replace") if answer.status_code == 200 else ""


def _parsed(body: str, metric: str) -> Any:
    """Return the JSON of a body, or the labels of a metric, and its values by the first label; None if there is neither."""
    if metric.endswith("{") and metric in body:
        values = re.findall(re.escape(metric) + r'\w+="(\w+)"[^}]*\} (\d+)', body)
        return dict(values) | dict(re.findall(r'(\w+)="([^"]*)"', body[body.index(metric) :].partition("\n")[0]))
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _value(answer: Any, place: str) -> Any:
    """Return what is at a place of an answer, None if nothing is."""
    if "|" in place:
        return next((value for part in place.split("|") if (value := _value(answer, part)) is not None), None)
    try:
        if "*" in place:
            one, other = (int(_value(answer, part)) for part in place.split("*"))
            return one * other
        for key in place.removeprefix("!").split("."):
            answer = answer[int(key) if isinstance(answer, list) else key]
        return answer if place[0] != "!" else not answer
    except (ValueError, LookupError, TypeError, OverflowError):
        return None

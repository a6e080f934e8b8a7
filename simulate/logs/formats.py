"""The formats of logs: how a file is opened, and where it has the fields of a request. A further one is an entry of FORMATS.

A place is as in `client/places.py`, with a factor that makes it seconds. Beside the fields of `Request`, `ttft`, `e2e` and `gaps`
(between chunks) are seconds after `base`, or after `sent` without one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from client.places import find, number
from client.report import store
from simulate.logs import steps
from simulate.logs.log import Note, Request

Row = Mapping[str, Any]
Opened = tuple[Iterable[Row], Row]  # objects that describe requests; settings of the server, and `notes`
PROBE, WHAT_IF = "./eb probe --log FILE", "curl -d '{\"policies\": []}' URL/what-if (of our own server)"
MOST_TOKENS = 1 << 21  # of one request; a greater number is none


class Format(NamedTuple):
    """What makes such files, the keys of the first object in them, and the places of a request's fields and of settings."""

    made_by: str
    keys: frozenset[str]
    places: Mapping[str, str]
    open: Callable[[list[Any], Path], Opened] = lambda rows, path: (rows, {})
    server: Mapping[str, str] = {}

    def read(self, rows: list[Any], path: Path) -> tuple[list[Request], dict[str, Any], tuple[Note, ...]]:
        """Return the requests of a file, what it says of the server, and what such a file leaves open."""
        found, facts = self.open(rows, path)
        server = {name: value for name, place in self.server.items() if (value := find(facts, place)) is not None}
        return [request(row, self.places) for row in found], server, facts.get("notes", ())


def tokens(value: Any) -> int:
    """Return a number of tokens, 0 for anything else."""
    return int(number(value)) if 0 < number(value) <= MOST_TOKENS else 0


def word(value: Any) -> str:
    return "" if value in (None, False, "complete") else str(value)


FIELDS = {
    **dict.fromkeys(("sent", "first", "last", "queued"), number), **dict.fromkeys(("id", "client", "error"), word),
    **dict.fromkeys(("prompt", "output", "limit", "priority", "cached"), tokens),
}  # fmt: skip


def request(row: Row, places: Mapping[str, str]) -> Request:
    """Return the request that an object describes."""
    raw = {name: find(row, place) for name, place in places.items()}
    since = number(raw.get("base", raw["sent"]))
    for name, after in (("first", "ttft"), ("last", "e2e")):
        raw[name] = since + number(raw[after]) if after in places else raw.get(name)
    if isinstance(gaps := raw.get("gaps"), list):
        raw["chunks"] = list(accumulate(map(number, gaps), initial=raw["first"]))
        raw["last"] = raw["last"] if "e2e" in places else raw["chunks"][-1]
    fields: dict[str, Any] = {name: read(raw.get(name)) for name, read in FIELDS.items()}
    for name, read in (("chunks", number), ("counts", tokens)):
        fields[name] = [read(one) for one in raw.get(name) or ()]
    if prefix := raw.get("prefix"):
        fields["prefix"] = (str(prefix[0]), tokens(prefix[1]))
    return Request(**fields)


def _bench(rows: list[Any], path: Path) -> Opened:
    """Turn a list for each field into an object for each request."""
    if len(rows) > 1:
        raise ValueError(f"it has {len(rows)} results, but must have 1. Copy the line of one run into its own file")
    run, count = rows[0], len(rows[0]["input_lens"])
    if "start_times" not in run and (str(run.get("request_rate")) != "inf" or run.get("max_concurrency")):
        raise ValueError("it has no start_times. Use a newer version, --request-rate inf, or this client's --csv")
    lists = {"start_times": [0.0] * count} | {k: v for k, v in run.items() if isinstance(v, list) and len(v) == count}
    facts = run | {"engine": "vllm" if run.get("backend") == "vllm" else None}
    return (dict(zip(lists, values)) for values in zip(*lists.values())), facts


def _ours(rows: list[Any], path: Path) -> Opened:
    """Prefer the requests.csv of a comparison to the lists of its run, since it has more."""
    facts, folder = rows[0] | {"engine": "ours"}, path.resolve().parent.parent
    labels = {name: facts.get(name) for name in store.LABELS}
    if path.resolve() != store.file_of(folder, labels):
        return _bench(rows, path)[0], facts
    found = store.read(folder).requests
    return (row for row in found if all(row[name] == str(label) for name, label in labels.items())), facts


def _csv(rows: list[Any], path: Path) -> Opened:
    if (runs := len({tuple(row.get(name) for name in store.LABELS) for row in rows})) > 1:
        raise ValueError(f"it has the requests of {runs} runs. Use a file of one run, or of the comparison's runs/")
    return rows, {}


def _guidellm(rows: list[Any], path: Path) -> Opened:
    """Collect the requests of all benchmarks, which are of one server, one after another."""
    found = [
        {**row, "error": status != "successful" and status}
        for benchmark in rows[0]["benchmarks"] for status, some in benchmark["requests"].items() for row in some or ()
    ]  # fmt: skip
    total = sum(tokens(find(benchmark, "metrics/request_totals/total")) for benchmark in rows[0]["benchmarks"])
    note = Note(f"The file has {len(found)} of {total:,} requests: the load of the others is missing.", 2.0)
    return found, {"notes": (note,) if total > len(found) else ()}


def _spans(rows: list[Any], path: Path) -> Opened:
    """Collect the attributes of all spans."""
    spans = (span for row in rows for r in row["resourceSpans"] for s in r["scopeSpans"] for span in s["spans"])
    found = [
        {pair["key"]: next(iter(pair["value"].values())) for pair in span.get("attributes", ())}
        | {"start": span["startTimeUnixNano"]} for span in spans
    ]  # fmt: skip
    return (row for row in found if "gen_ai.usage.prompt_tokens" in row), {"engine": "vllm"}


def _serving_sim(rows: list[Any], path: Path) -> Opened:
    meta = path.parent / "meta.json"
    facts: Any = {"engine": "vllm"} | (json.loads(meta.read_text("utf-8")) if meta.is_file() else {})
    parallel = tokens(find(facts, "engine_kwargs/data_parallel_size")) or 1
    note = Note(f"Its data_parallel_size is {parallel}: settings are sums over these engines, fitted as one.", 1.2)
    return rows, {**facts, "parallel": parallel, "notes": (note,) if parallel > 1 else ()}


def _steps(rows: list[Any], path: Path) -> Opened:
    """Follow each request through the steps of our own server."""
    text = "Step records have no arrivals: requests count as arrived when they joined, so that waiting is not fitted."
    slots = max(round(sum(row["slot_steps"].values())) for row in rows)
    facts = {"engine": "ours", "policy": rows[0]["policy"], "slots": slots, "notes": (Note(text, 1.5),)}
    return steps.requests(rows), facts


def _served(rows: list[Any], path: Path) -> Opened:
    """Follow the requests that our server has served, in its answer to POST /what-if."""
    records = [each for record in rows[0]["lanes"][0]["records"] for each in steps.expanded(record)]
    found, facts = _steps(records, path)
    sent = {str(i): request["t"] for i, request in enumerate(rows[0]["requests"])}
    return [{**row, "sent": sent[row["id"]]} for row in found], {**facts, "notes": ()}


def _places(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


SAME = {name: name for name in Request._fields}
SETTINGS = _places(
    "engine=engine version=version model=model|model_id policy=policy policy_options=policy_options slots=slots"
    " tokens_per_step=tokens_per_step kv_tokens=kv_tokens page_size=page_size prefix_cache=prefix_cache"
)
OURS = _places("""sent=sent_s|start_times base=arrival_s|start_times ttft=ttft_s|ttfts e2e=latency_s|e2els id=id client=client
    prompt=prompt_tokens|input_lens output=output_tokens|output_lens cached=cached_tokens|cached_lens gaps=itls limit=max_tokens error=outcome|errors""")
FORMATS = (
    Format("./eb load --csv FILE", frozenset({"sent_s", "latency_s", "outcome"}), OURS, _csv),
    Format("./eb load --json FILE, ./eb compare --out FOLDER", frozenset({"asked_lens", "ttfts"}), OURS, _ours, _places(
        """engine=engine policy=policy model=model_id policy_options=server_after/engine/policy_options
        slots=server_after/engine/max_batch_size tokens_per_step=server_after/engine/max_tokens_per_step
        kv_tokens=server_after/engine/kv/pages_total*server_after/engine/kv/page_size page_size=server_after/engine/kv/page_size""")),
    Format("vllm bench serve --save-result --save-detailed", frozenset({"input_lens", "output_lens", "ttfts"}), _places(
        "sent=start_times prompt=input_lens output=output_lens ttft=ttfts gaps=itls error=errors"), _bench, SETTINGS),
    Format("guidellm benchmark --output kind=json,path=FILE.json (before 0.7: --output-path FILE.json)", frozenset({"benchmarks"}), _places(
        """sent=info/timings/request_start|info/timings/resolve_start|start_time prompt=prompt_tokens output=output_tokens
        first=info/timings/first_token_iteration|first_token_time id=request_id error=error
        last=info/timings/last_token_iteration|last_token_time|info/timings/request_end|end_time"""), _guidellm),
    Format("aiperf profile --streaming (its profile_export.jsonl)", frozenset({"metadata", "metrics"}), _places(
        """sent=metadata/request_start_ns*1e-9 ttft=metrics/time_to_first_token/value*1e-3 id=metadata/x_request_id
        e2e=metrics/request_latency/value*1e-3 gaps=metrics/inter_chunk_latency/value*1e-3 client=metadata/x_correlation_id
        prompt=metrics/usage_prompt_tokens/value|metrics/input_sequence_length/value|metrics/error_isl/value
        output=metrics/usage_completion_tokens/value|metrics/output_sequence_length/value
        cached=metrics/usage_prompt_cache_read_tokens/value error=error/type|metadata/was_cancelled""")),
    Format("LLMServingSim (requests.jsonl of a run of vLLM, with meta.json)", frozenset({"input_toks", "output_toks"}), _places(
        """sent=arrival_time queued=queued_ts first=first_token_ts last=last_token_ts prompt=input_toks output=output_toks
        id=request_id prefix=prefix"""), _serving_sim, _places(
        """engine=engine version=vllm_version model=model hardware=hardware/device_name page_size=kv_cache/block_size
        prefix_cache=kv_cache/enable_prefix_caching parallel=parallel
        slots=engine_kwargs/max_num_seqs*parallel tokens_per_step=engine_kwargs/max_num_batched_tokens*parallel
        kv_tokens=kv_cache/num_gpu_blocks*kv_cache/block_size*parallel""")),
    Format("vllm serve --otlp-traces-endpoint URL (the collector's file exporter)", frozenset({"resourceSpans"}), _places(
        """sent=start*1e-9 ttft=gen_ai.latency.time_to_first_token e2e=gen_ai.latency.e2e limit=gen_ai.request.max_tokens
        prompt=gen_ai.usage.prompt_tokens output=gen_ai.usage.completion_tokens id=gen_ai.request.id"""), _spans, SETTINGS),
    Format("./eb compare (its iterations.jsonl)", frozenset({"members", "slot_steps"}), SAME, _steps, SETTINGS),
    Format(WHAT_IF, frozenset({"served", "lanes"}), SAME, _served, SETTINGS),
    Format(PROBE, frozenset({"server"}), SAME, lambda rows, path: (rows[1:], rows[0]["server"]), SETTINGS),
)  # fmt: skip

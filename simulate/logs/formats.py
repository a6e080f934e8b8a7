"""The formats of logs: how a file is opened, and where it has the fields of a request. A further one is an entry of FORMATS.

A place is a path of keys, "metrics/time_to_first_token/value*1e-3" with its unit in seconds; "a|b" is b where a has nothing.
Beside the fields of `Request`, `ttft`, `e2e` and `gaps` (between chunks) are seconds after `base`, or after `sent` without one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from client.report import store
from simulate.logs import steps
from simulate.logs.reading import NAN, Note, Reading, Request

Opened = tuple[
    Iterable[Any], Mapping[str, Any]
]  # objects that describe requests; settings of the server, `notes` and `steps`
MOST_TOKENS = 1 << 21  # of one request; a greater number is none
SIZES = ("slots", "tokens_per_step", "kv_tokens", "pages", "page_size")


class Format(NamedTuple):
    """What makes such files, the keys of the first object in them, and the places of a request's fields and of settings."""

    made_by: str
    keys: frozenset[str]
    places: Mapping[str, str]
    open: Callable[[list[Any], Path], Opened] = lambda rows, path: (rows, {})
    server: Mapping[str, str] = {}

    def read(self, rows: list[Any], path: Path) -> Reading:
        """Return what the objects of a file say."""
        found, facts = self.open(rows, path)
        server = {name: value for name, place in self.server.items() if (value := find(facts, place)) is not None}
        server = {k: v for k, v in server.items() if k not in SIZES or (type(v) is int and v > 0)}
        if pages := server.pop("pages", 0):
            server["kv_tokens"] = pages * server.get("page_size", 1)
        requests = [request(row, self.places) for row in found]
        return Reading(requests, server, facts.get("steps", ()), facts.get("notes", ()))


def find(row: Any, place: str) -> Any:
    """Return what an object has at a place, None if nothing."""
    path, _, unit = place.partition("*")
    for way in path.split("|"):
        value = row
        for key in way.split("/"):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, list) and unit:
            return [number(one, unit) for one in value]
        if value is not None:
            return number(value, unit) if unit else value
    return None


def number(value: Any, unit: str = "1") -> float:
    """Return a finite number in seconds, NaN for anything else."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return value * float(unit) if usable else NAN


def tokens(value: Any) -> int:
    """Return a number of tokens, 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_TOKENS else 0


def request(row: Any, places: Mapping[str, str]) -> Request:
    """Return the request that an object describes."""
    raw = {name: value for name, place in places.items() if (value := find(row, place)) is not None}
    fields: dict[str, Any] = {name: number(raw.get(name)) for name in ("sent", "first", "last", "queued")}
    fields |= {name: tokens(raw.get(name)) for name in ("prompt", "output", "limit", "priority", "cached")}
    words = {name: raw.get(name) for name in ("id", "client", "error")}
    fields |= {name: str(word) for name, word in words.items() if word is not False and word not in (None, "complete")}
    for name, since in (("first", "ttft"), ("last", "e2e")):
        if since in places:
            fields[name] = number(raw.get("base", raw.get("sent"))) + number(raw.get(since))
    if isinstance(gaps := raw.get("gaps"), list):
        fields["chunks"] = list(accumulate(map(number, gaps), initial=fields["first"]))
        fields["last"] = fields["last"] if "e2e" in places else fields["chunks"][-1]
    if isinstance(chunks := raw.get("chunks"), list):
        fields |= {"chunks": [*map(number, chunks)], "counts": [*map(tokens, raw.get("counts") or ())]}
    if isinstance(prefix := raw.get("prefix"), list):
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
    """Prefer the requests.csv of a comparison to the lists of its run, since it has more; the server's steps are beside it."""
    facts, folder = rows[0] | {"engine": "ours"}, path.resolve().parent.parent
    labels = {name: facts.get(name) for name in store.LABELS}
    if path.resolve() != store.file_of(folder, labels):
        return _bench(rows, path)[0], facts
    results = store.read(folder)
    mine = [row for row in results.requests if all(row[name] == str(label) for name, label in labels.items())]
    return map(_cells, mine), facts | {"steps": results.iterations(*labels.values())}


def _csv(rows: list[Any], path: Path) -> Opened:
    if (runs := len({tuple(row.get(name) for name in store.LABELS) for row in rows})) > 1:
        raise ValueError(
            f"it has the requests of {runs} runs. Use a file of one run, or a file of the comparison's runs/"
        )
    return map(_cells, rows), {}


def _cells(row: Mapping[str, str]) -> dict[str, Any]:
    """Return a line of CSV with numbers where it has some, without its empty cells."""
    found: dict[str, Any] = {name: text for name, text in row.items() if text}
    for name, text in found.items():
        for kind in (float, int):
            with suppress(ValueError, TypeError):
                found[name] = kind(text)
    return found


def _guidellm(rows: list[Any], path: Path) -> Opened:
    """Collect the requests of all benchmarks, which are of one server, one after another."""
    found = [
        {**row, "error": status != "successful" and status}
        for benchmark in rows[0]["benchmarks"] for status, some in benchmark["requests"].items() for row in some or ()
    ]  # fmt: skip
    total = sum(tokens(find(benchmark, "metrics/request_totals/total")) for benchmark in rows[0]["benchmarks"])
    note = Note(f"The file has {len(found)} of {total:,} requests: the load of the others is missing.", 2.0)
    return found, {"notes": (note,) if total > len(found) else ()}


def _aiperf(rows: list[Any], path: Path) -> Opened:
    names = ("time_to_first_token", "request_latency", "inter_chunk_latency")
    if units := {find(row, f"metrics/{name}/unit") for row in rows for name in names} - {None, "ms"}:
        raise ValueError(f"its latencies are in {units}, but must be in ms. Use the profile_export.jsonl of AIPerf")
    return rows, {}


def _spans(rows: list[Any], path: Path) -> Opened:
    """Collect the attributes of all spans; OTLP writes 64-bit integers as strings."""
    found = []
    for span in (span for row in rows for r in row["resourceSpans"] for s in r["scopeSpans"] for span in s["spans"]):
        pairs = [(pair["key"], *next(iter(pair["value"].items()))) for pair in span.get("attributes", ())]
        values = {key: int(value) if kind == "intValue" else value for key, kind, value in pairs}
        found += [values | {"start": int(span["startTimeUnixNano"])}] if "gen_ai.usage.prompt_tokens" in values else []
    return found, {"engine": "vllm", "model": found and found[0].get("gen_ai.response.model")}


def _serving_sim(rows: list[Any], path: Path) -> Opened:
    meta = path.parent / "meta.json"
    return rows, {"engine": "vllm"} | (json.loads(meta.read_text("utf-8")) if meta.is_file() else {})


def _places(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


SAME = {name: name for name in Request._fields}
SETTINGS = _places(
    "engine=engine version=version model=model|model_id hardware=hardware policy=policy slots=slots kv_tokens=kv_tokens"
    " policy_options=policy_options tokens_per_step=tokens_per_step page_size=page_size prefix_cache=prefix_cache"
)
OURS = _places("""sent=sent_s|start_times base=arrival_s|start_times ttft=ttft_s|ttfts e2e=latency_s|e2els id=id client=client
    prompt=prompt_tokens|input_lens output=output_tokens|output_lens cached=cached_tokens limit=max_tokens error=outcome|errors""")
FORMATS = (
    Format("./eb load --csv FILE", frozenset({"sent_s", "latency_s", "outcome"}), OURS, _csv),
    Format("./eb load --json FILE, ./eb compare --out FOLDER", frozenset({"asked_lens", "ttfts"}), OURS, _ours, _places(
        """engine=engine policy=policy model=model_id policy_options=server_after/engine/policy_options
        slots=server_after/engine/max_batch_size tokens_per_step=server_after/engine/max_tokens_per_step
        pages=server_after/engine/kv/pages_total page_size=server_after/engine/kv/page_size""")),
    Format("vllm bench serve --save-result --save-detailed", frozenset({"input_lens", "output_lens", "ttfts"}), _places(
        "sent=start_times prompt=input_lens output=output_lens ttft=ttfts gaps=itls error=errors"), _bench, SETTINGS),
    Format("guidellm benchmark --output-path FILE.json", frozenset({"benchmarks"}), _places(
        """sent=info/timings/request_start|info/timings/resolve_start|start_time prompt=prompt_tokens output=output_tokens
        first=info/timings/first_token_iteration|first_token_time id=request_id error=error
        last=info/timings/last_token_iteration|last_token_time|info/timings/request_end|end_time"""), _guidellm),
    Format("aiperf profile --streaming (its profile_export.jsonl)", frozenset({"metadata", "metrics"}), _places(
        """sent=metadata/request_start_ns*1e-9 ttft=metrics/time_to_first_token/value*1e-3 id=metadata/x_request_id
        e2e=metrics/request_latency/value*1e-3 gaps=metrics/inter_chunk_latency/value*1e-3 client=metadata/x_correlation_id
        prompt=metrics/usage_prompt_tokens/value|metrics/input_sequence_length/value|metrics/error_isl/value
        output=metrics/usage_completion_tokens/value|metrics/output_sequence_length/value
        cached=metrics/usage_prompt_cache_read_tokens/value error=error/type|metadata/was_cancelled"""), _aiperf),
    Format("LLMServingSim (requests.jsonl of a run of vLLM, with meta.json)", frozenset({"input_toks", "output_toks"}), _places(
        """sent=arrival_time queued=queued_ts first=first_token_ts last=last_token_ts prompt=input_toks output=output_toks
        id=request_id prefix=prefix"""), _serving_sim, _places(
        """engine=engine version=vllm_version model=model hardware=hardware/device_name slots=engine_kwargs/max_num_seqs
        tokens_per_step=engine_kwargs/max_num_batched_tokens pages=kv_cache/num_gpu_blocks page_size=kv_cache/block_size
        prefix_cache=kv_cache/enable_prefix_caching""")),
    Format("vllm serve --otlp-traces-endpoint URL (the collector's file exporter)", frozenset({"resourceSpans"}), _places(
        """sent=start*1e-9 ttft=gen_ai.latency.time_to_first_token e2e=gen_ai.latency.e2e limit=gen_ai.request.max_tokens
        prompt=gen_ai.usage.prompt_tokens output=gen_ai.usage.completion_tokens id=gen_ai.request.id"""), _spans, SETTINGS),
    Format("./eb compare (its iterations.jsonl)", frozenset({"members", "slot_steps"}), SAME,
           lambda rows, path: (steps.requests(rows), steps.facts(rows)), SETTINGS),
    Format("./eb probe --log FILE", frozenset({"server"}), SAME, lambda rows, path: (rows[1:], rows[0]["server"]), SETTINGS),
)  # fmt: skip

"""GET /metrics: vLLM's names and units where the meaning is the same, and `eb_*` for the rest.

Metrics are computed only when scraped. No label has a value from a client. This module must not know how things are
counted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from api.service import Service
from batch_files.store import STATUSES
from observe.card import GAUGES
from observe.meters import Histogram

Values = Mapping[str, float]


class Exposition(Collector):
    """Collects the metrics of one server at each scrape."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def describe(self) -> list[Metric]:
        """Return nothing: the metrics are known only at a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._vllm_state()
        yield from self._vllm_requests()
        yield from self._steps()
        yield from self._answers()
        yield from self._server()
        yield from self._batches()

    @property
    def _names(self) -> dict[str, str]:
        """The labels of vLLM's metrics."""
        engine, config = self.service.engine, self.service.config
        name = engine.served_name if engine is not None else config.model or "loading"
        return {"engine": "0", "model_name": name}

    def _vllm_state(self) -> Iterator[Metric]:
        manager = self.service.engine.manager if self.service.engine else None
        pages = manager.pages if manager else None
        running, waiting = (manager.running, manager.waiting) if manager else (0, 0)
        share = pages.used / pages.total if pages else 0.0
        one = self._names
        yield gauge("vllm:num_requests_running", "Requests in the batch.", one, running)
        yield gauge("vllm:num_requests_waiting", "Requests in the queue.", one, waiting)
        yield gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, from 0 to 1.", one, share)
        cache = {
            "block_size": str(pages.page_size if pages else 0),
            "num_gpu_blocks": str(pages.total if pages else 0),
            "enable_prefix_caching": str(bool(pages and pages.prefix_cache)),
        }
        yield gauge("vllm:cache_config_info", "Configuration of the KV cache.", one | cache, 1)
        queries, hits = (pages.query_tokens, pages.hit_tokens) if pages else (0, 0)
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", one, queries)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", one, hits)

    def _vllm_requests(self) -> Iterator[Metric]:
        m, one = self.service.meters, self._names
        yield counter(
            "vllm:prompt_tokens", "Prompt tokens computed or found in the prefix cache.", one, m.prompt_tokens
        )
        yield counter("vllm:generation_tokens", "Tokens generated.", one, m.generation_tokens)
        yield counter("vllm:num_preemptions", "Preempted requests.", one, m.preemptions)
        yield counter("vllm:spec_decode_num_drafts", "Times that a request had drafts in a step.", one, m.drafts)
        yield counter("vllm:spec_decode_num_draft_tokens", "Draft tokens computed.", one, m.draft_tokens)
        right = m.accepted_at
        yield counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", one, sum(right))
        help = "Accepted draft tokens, by their place."
        by_place = {str(place): times for place, times in enumerate(right)}
        yield counters("vllm:spec_decode_num_accepted_tokens_per_pos", help, "position", by_place, one)
        ended = dict(m.finished)
        by_reason = {"stop": ended.pop("stop", 0), "length": ended.pop("length", 0)}
        by_reason["abort"] = sum(ended.values())
        help = "Finished requests by reason."
        yield counters("vllm:request_success", help, "finished_reason", by_reason, one)
        per_token = "Seconds between consecutive tokens of a request."
        for name, help, values in (
            ("vllm:time_to_first_token_seconds", "Seconds from arrival to first token.", m.ttft),
            ("vllm:inter_token_latency_seconds", per_token, m.itl),
            ("vllm:time_per_output_token_seconds", f"{per_token} Old name of the inter-token latency.", m.itl),
            (
                "vllm:request_time_per_output_token_seconds",
                "Mean seconds per token after the first, by request.",
                m.tpot,
            ),
            ("vllm:e2e_request_latency_seconds", "Seconds from arrival to end.", m.e2e),
            ("vllm:request_queue_time_seconds", "Seconds from arrival to first step.", m.queue),
            ("vllm:request_prefill_time_seconds", "Seconds from first step to first token.", m.prefill),
            ("vllm:request_decode_time_seconds", "Seconds from first token to last token.", m.decode),
            ("vllm:request_inference_time_seconds", "Seconds from first step to last token.", m.inference),
            ("vllm:request_prompt_tokens", "Tokens per prompt.", m.prompt_length),
            ("vllm:request_generation_tokens", "Tokens per answer.", m.output_length),
            ("vllm:request_params_max_tokens", "Requested tokens per request.", m.max_tokens),
            ("vllm:request_params_n", "Choices per HTTP request.", m.choices),
            (
                "vllm:request_max_num_generation_tokens",
                "Tokens of the longest choice of an HTTP request.",
                m.longest_choice,
            ),
            ("vllm:iteration_tokens_total", "Tokens computed per step.", m.iteration_tokens),
        ):
            yield histograms(name, help, None, {"": values}, one)

    def _steps(self) -> Iterator[Metric]:
        m = self.service.meters
        help = "Seconds per step, by phase."
        yield histograms("eb_iteration_seconds", help, "phase", m.iteration_seconds)
        yield histograms("eb_batch_size", "Requests per step.", None, {"": m.batch_sizes})
        help = "Seconds that steps waited for the token masks of constrained requests."
        yield counter("eb_mask_seconds", help, {}, m.mask_seconds)
        help = "Experts of a mixture, over all layers and steps, by whether the step read them."
        yield counters("eb_experts", help, "kind", m.experts)
        grammars = self.service.engine.grammars if self.service.engine else None
        counted = {} if grammars is None else grammars.counts
        by_result = {kind: counted.get(kind, 0) for kind in ("compiled", "cached", "refused")}
        yield counters("eb_forms", "Forms of answers that requests asked for, by result.", "result", by_result)
        yield gauge("eb_forms_kept", "Compiled forms in memory.", {}, 0 if grammars is None else len(grammars))
        help = "Seconds that requests waited, by reason."
        yield histograms("eb_queue_wait_seconds", help, "reason", m.waited)
        spent = m.slot_steps.copy()
        yield counters("eb_slot_steps", "Slots times steps, by use.", "kind", spent)
        where = {place: m.cancelled[place] for place in ("queued", "prefill", "decode")}
        yield counters("eb_cancelled", "Cancelled requests, by state at that time.", "where", where)

    def _answers(self) -> Iterator[Metric]:
        m = self.service.meters
        requests = CounterMetricFamily(
            "eb_http_requests", "HTTP responses by route and status.", labels=("route", "status")
        )
        yield filled(requests, (((route, str(status)), n) for (route, status), n in sorted(m.http.copy().items())))
        rejected = m.rejected.copy()
        yield counters("eb_rejected", "Rejected requests by reason.", "reason", rejected)
        yield counter("eb_ignored_params", "Request fields that had no effect.", {}, m.ignored)
        help = "Log lines dropped because their reader was too slow."
        yield counter("eb_events_dropped", help, {}, self.service.access_log.dropped)

    def _server(self) -> Iterator[Metric]:
        service, engine = self.service, self.service.engine
        manager = engine.manager if engine else None
        r = manager.recovery if manager else None
        failed, retried, dry = (r.steps_failed, r.steps_retried, r.out_of_memory) if r else (0, 0, 0)
        yield counter("eb_step_failures", "Failed steps.", {}, failed)
        yield counter("eb_step_retries", "Retried steps.", {}, retried)
        yield counter("eb_out_of_memory", "Steps that ran out of memory.", {}, dry)
        yield counter("eb_engine_deaths", "Engine failures that ended the process.", {}, service.deaths())
        dedup = manager.dedup if manager else None
        help = "Requests that were answered with another one's tokens."
        yield counter("eb_deduplicated_requests", help, {}, dedup.copies if dedup else 0)
        help = "Tokens of answers that were computed for another request."
        yield counter("eb_deduplicated_tokens", help, {}, dedup.tokens if dedup else 0)
        help = "Policies that failed after a switch, so that the one before serves again."
        yield counter("eb_policy_failures", help, {}, manager.fallback.failures if manager else 0)
        policy = {"policy": manager.policy_name if manager else service.config.policy}
        yield gauge("eb_policy_info", "Active batching policy.", policy, 1)
        formats = {name: getattr(engine, name, "") for name in ("device", "dtype", "quantize", "kv_dtype")}
        formats["linear"] = str(engine.facts.get("linear", "")) if engine else ""
        yield gauge("eb_info", "Device and number formats of the engine.", formats, 1)
        for name, value in (engine.facts.get("gauges", dict)() if engine else {}).items():
            yield gauge(name, GAUGES[name][0], {}, value)
        yield gauge("eb_engine_up", "1 if the batching loop is alive.", {}, float(service.status()[0] == "ok"))
        age = service.heartbeat_age()
        help = "Seconds since the last iteration of the batching loop."
        yield gauge("eb_last_iteration_age_seconds", help, {}, 0.0 if age is None else age)
        slots = manager.max_batch_size if manager else service.config.max_batch_size
        yield gauge("eb_slots", "Slots of the batch.", {}, slots)
        cap = manager.slot_cap if manager else slots
        yield gauge("eb_slot_cap", "Usable slots; fewer than eb_slots after memory ran out.", {}, cap)
        yield gauge("eb_event_viewers", "Viewers of /events.", {}, len(service.feed.viewers))
        store = engine.adapters if engine else None
        here = sum(entry.loaded is not None for entry in store.entries()) if store else 0
        yield gauge("eb_adapters", "LoRA adapters in memory.", {}, here)
        yield gauge("eb_adapter_bytes", "Bytes of LoRA adapters in memory.", {}, store.nbytes if store else 0)
        yield counter("eb_adapter_loads", "LoRA adapters read.", {}, store.loads if store else 0)
        help = "LoRA adapters that left memory for others."
        yield counter("eb_adapter_evictions", help, {}, store.evictions if store else 0)

    def _batches(self) -> Iterator[Metric]:
        runner = self.service.batches
        lines = {"completed": runner.completed if runner else 0, "failed": runner.failed if runner else 0}
        yield counters("eb_batch_lines", "Lines of batches that were answered, by result.", "result", lines)
        try:
            files, size, batches = runner.store.usage() if runner else (0, 0, {})
        except sqlite3.Error:  # the disk fails; the other metrics do not
            return
        family = GaugeMetricFamily("eb_batches", "Batches by status.", labels=("status",))
        yield filled(family, (((status,), batches.get(status, 0)) for status in STATUSES))
        yield gauge("eb_batch_files", "Files in --batch-folder.", {}, files)
        yield gauge("eb_batch_file_bytes", "Bytes of the files in --batch-folder.", {}, size)


def filled(family: GaugeMetricFamily | CounterMetricFamily, series: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """Return a metric with a value for the labels of each of its series."""
    for labels, value in series:
        family.add_metric(labels, value)
    return family


def gauge(name: str, help: str, labels: Mapping[str, str], value: float) -> Metric:
    return filled(GaugeMetricFamily(name, help, labels=tuple(labels)), [(tuple(labels.values()), value)])


def counter(name: str, help: str, labels: Mapping[str, str], value: float) -> Metric:
    return filled(CounterMetricFamily(name, help, labels=tuple(labels)), [(tuple(labels.values()), value)])


def counters(name: str, help: str, label: str, values: Values, common: Mapping[str, str] | None = None) -> Metric:
    """Return a counter with one series for each value of a label."""
    common = common or {}
    family = CounterMetricFamily(name, help, labels=(label, *common))
    return filled(family, (((word, *common.values()), value) for word, value in values.items()))


def histograms(
    name: str, help: str, label: str | None, values: Mapping[str, Histogram], common: Mapping[str, str] | None = None
) -> Metric:
    """Return a histogram with one series for each value of a label, or one without."""
    common = common or {}
    family = HistogramMetricFamily(name, help, labels=(*([] if label is None else [label]), *common))
    for word, histogram in values.items():
        words: tuple[Any, ...] = (*(() if label is None else (word,)), *common.values())
        bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
        family.add_metric(words, list(zip(bounds, accumulate(list(histogram.counts)))), histogram.sum)
    return family

"""Metrics in Prometheus' text format, with the names of vLLM where the meaning is the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvad.engine.scheduling import RequestMetrics

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2.5)

# Codes of a request's error: other ones are aborts (the client left, a time limit, the shutdown).
ERRORS = ("engine_error", "numerical_error", "internal_error")
REFUSED = ("invalid_value",)


class ServerMetrics:
    """Counters and histograms of a server, and gauges of its engine."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model_name
        histogram = {
            name: self._histogram(f"vllm:{name}", text, TOKEN_SECONDS if "token_l" in name else SECONDS)
            for name, text in (
                ("time_to_first_token_seconds", "Seconds from arrival to the first token."),
                ("inter_token_latency_seconds", "Mean seconds between two tokens of a request."),
                ("e2e_request_latency_seconds", "Seconds of a request."),
                ("request_queue_time_seconds", "Seconds in the queue."),
                ("request_prefill_time_seconds", "Seconds from the queue to the first token."),
                ("request_decode_time_seconds", "Seconds from the first token to the last."),
            )
        }
        self._histograms = histogram
        self._finished = self._counter(
            "vllm:request_success", "Ended samples by the reason of their end, also abort and error.", "finished_reason"
        )
        self._failures = self._counter(
            "kvad:request_failures", "Requests that ended early, by the error's code.", "code"
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens.")
        self._generated_tokens = self._counter("vllm:generation_tokens", "Generated tokens.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens that were not computed.")
        self._preemptions = self._counter("vllm:num_preemptions", "Preempted requests.")
        self._events = self._counter("kvad:stream_chunks", "Chunks of event streams.")
        self._responses = self._counter("kvad:responses", "HTTP responses.", "status")
        self._gauges: dict[str, Gauge] = {}

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        metric = Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry)
        return metric.labels(self._model)

    def _counter(self, name: str, text: str, label: str | None = None) -> Any:
        metric = Counter(name, text, ["model_name", *([label] if label else [])], registry=self._registry)
        return metric if label else metric.labels(self._model)

    def observe_request(self, metrics: RequestMetrics) -> None:
        """Add an ended request."""
        finished = metrics.finished if metrics.finished is not None else metrics.arrived
        admitted = metrics.admitted if metrics.admitted is not None else finished
        first = metrics.first_token if metrics.first_token is not None else finished
        self._prompt_tokens.inc(metrics.num_prompt_tokens)
        self._generated_tokens.inc(metrics.num_completion_tokens)
        self._queries.inc(metrics.num_prompt_tokens)
        self._hits.inc(metrics.num_cached_tokens)
        self._preemptions.inc(metrics.num_preemptions)
        histograms = self._histograms
        histograms["e2e_request_latency_seconds"].observe(finished - metrics.arrived)
        histograms["request_queue_time_seconds"].observe(admitted - metrics.arrived)
        if metrics.first_token is not None:
            histograms["time_to_first_token_seconds"].observe(first - metrics.arrived)
            histograms["request_prefill_time_seconds"].observe(first - admitted)
            histograms["request_decode_time_seconds"].observe(finished - first)
        if metrics.num_completion_tokens > 1:
            latency = (finished - first) / (metrics.num_completion_tokens - 1)
            histograms["inter_token_latency_seconds"].observe(latency)

    def observe_finish(self, reason: str, count: int = 1) -> None:
        self._finished.labels(self._model, reason).inc(count)

    def observe_failure(self, code: str, num_samples: int) -> None:
        """Add a request that ended before ``num_samples`` of its samples did; one that the engine refused has none."""
        self._failures.labels(self._model, code).inc()
        if code not in REFUSED:
            self.observe_finish("error" if code in ERRORS else "abort", num_samples)

    def observe_chunks(self, count: int) -> None:
        self._events.inc(count)

    def observe_response(self, status: int) -> None:
        self._responses.labels(self._model, str(status)).inc()

    def expose(self, stats: Mapping[str, Any] | None, num_streams: int) -> bytes:
        """Return the text of all metrics, with the engine's ``stats`` if it replied."""
        self._set("kvad:requests_in_progress", "Requests of clients that have not ended.", num_streams)
        if stats is not None:
            scheduler, cache = stats["scheduler"], stats["cache"]
            used, total = sum(cache["used"]), max(1, sum(cache["total"]))
            for name, text, value in (
                ("vllm:num_requests_running", "Running sequences.", scheduler["running"]),
                ("vllm:num_requests_waiting", "Waiting sequences.", scheduler["waiting"]),
                ("vllm:kv_cache_usage_perc", "Fraction of the pool's blocks in use.", used / total),
                ("kvad:evicted_blocks", "Blocks evicted from the prefix cache.", sum(cache["evictions"])),
                ("kvad:draft_tokens", "Draft tokens that the model checked.", scheduler["draft_tokens"]),
                ("kvad:accepted_tokens", "Draft tokens that were generated.", scheduler["accepted_tokens"]),
                ("kvad:engine_steps", "Steps of the engine.", stats["times"]["steps"]),
                ("kvad:engine_step_seconds", "Seconds of all steps.", stats["times"]["total"]),
                ("kvad:engine_model_seconds", "Seconds of forward passes.", stats["times"]["model"]),
            ):
                self._set(name, text, value)
        return generate_latest(self._registry)

    def _set(self, name: str, text: str, value: float) -> None:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, text, ["model_name"], registry=self._registry)
        self._gauges[name].labels(self._model).set(value)

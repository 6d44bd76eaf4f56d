"""What the server counts and measures, in a Prometheus registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True)
class Reading:
    """A number that is read where it lives when it is asked for."""

    name: str
    text: str
    value: Callable[[], float]
    counts: bool = False  # it only grows


class Metrics:
    """The registry and what is written into it; all of it may be used from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, CPU seconds and open files of this process
        self.requests = Counter(
            "memjax_requests",
            "Generations by outcome: stop, length, cancelled, timeout, failed, invalid, rejected.",
            ["outcome"],
            registry=self.registry,
        )
        self.responses = Counter(
            "memjax_http_responses", "Answers by route and status.", ["route", "status"], registry=self.registry
        )
        self.keys = Counter(
            "memjax_key_requests", "Requests by key: the beginning of its hash.", ["key"], registry=self.registry
        )
        self.first_token = self._histogram("memjax_time_to_first_token_seconds", "From arrival to the first token.")
        self.token = self._histogram("memjax_time_per_output_token_seconds", "Between two tokens of a reply, its mean.")
        self.request = self._histogram("memjax_request_seconds", "From arrival to the last token.")

    def watch(self, readings: list[Reading]) -> None:
        """Report numbers that live elsewhere."""
        self.registry.register(_Readings(readings))

    def totals(self) -> Mapping[str, float]:
        """The outcomes counted so far."""
        samples = next(iter(self.requests.collect())).samples
        return {sample.labels["outcome"]: sample.value for sample in samples if sample.name.endswith("_total")}

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_SECONDS, registry=self.registry)


class _Readings:
    def __init__(self, readings: list[Reading]):
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        for reading in self._readings:
            family = CounterMetricFamily if reading.counts else GaugeMetricFamily
            yield family(reading.name, reading.text, value=reading.value())

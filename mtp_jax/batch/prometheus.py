"""A job's numbers for Prometheus, under the names that dashboards for vLLM look for."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from mtp_jax.batch.summary import Summary
from mtp_jax.batch.watching import Gauges, Watcher
from mtp_jax.core.errors import ConfigError
from mtp_jax.engine.scheduler import Totals
from mtp_jax.llm import LLM

_COUNTERS = {
    "vllm:generation_tokens": ("num_emitted_tokens", "Tokens written."),
    "vllm:num_preemptions": ("num_preemptions", "Requests taken off the device for want of pages."),
    "vllm:spec_decode_num_drafts": ("num_drafts", "Steps of a request that drafted."),
    "vllm:spec_decode_num_draft_tokens": ("num_draft_tokens", "Drafts verified."),
    "vllm:spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Drafts accepted."),
}
_GAUGES = {
    "vllm:num_requests_running": ("num_running", "Requests that hold a slot."),
    "vllm:num_requests_waiting": ("num_waiting", "Requests in the queue."),
    "mtp_jax:draft_len": ("draft_len", "Drafts a slot in the last decode step."),
}


class Endpoint(Watcher):
    """Serves `/metrics` on `port` (0: any free one, then in `port`) while the job runs.

    `ConfigError` where prometheus_client is not installed or the port is taken.
    """

    def __init__(self, port: int, model: str, process: int = 0) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise ConfigError("--metrics-port needs prometheus_client: pip install 'mtp-jax[metrics]'.") from error
        self._labels = {"model_name": model, "engine": str(process)}
        self._summary = Summary()
        self._llm: LLM | None = None
        self._totals: list[Totals] = []  # of every engine there was
        self._finished: Counter[str] = Counter()
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]  # it has `collect`
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, registry=registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--metrics-port {port} cannot be served: {error}.") from error
        self.port = self._server.server_port

    def began(self, summary: Summary, job: Mapping[str, Any]) -> None:
        """Remembers what counts."""
        self._summary = summary

    def engine_started(self, llm: LLM) -> None:
        """Its counters begin at zero; those of the engines before it stay."""
        self._llm = llm
        self._totals.append(llm.engine.group.totals)

    def finished(self, number: int, result: Mapping[str, Any]) -> None:
        """Counts by why the samples ended."""
        if result["error"] is not None:
            self._finished["error"] += 1
            return
        self._finished.update(choice["finish_reason"] for choice in result["response"]["body"]["choices"])

    def ended(self, summary: Summary) -> None:
        """Frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Prometheus' own protocol; called by the server's thread, which only reads."""
        totals, gauges = summed(self._totals), Gauges.of(self._llm)
        for name, (attribute, text) in _GAUGES.items():
            yield self._gauge(name, text, getattr(gauges, attribute))
        used = gauges.num_pages_used / gauges.num_pages if gauges.num_pages else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Pages in use; 1 is all of them.", used)
        for name, (attribute, text) in _COUNTERS.items():
            yield self._counter(name, text, [({}, getattr(totals, attribute))])
        yield self._counter(
            "vllm:prompt_tokens", "Prompt tokens of finished requests.", [({}, self._summary.num_prompt_tokens)]
        )
        by_position = enumerate(totals.num_accepted_tokens_per_pos)
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by position.",
            [({"position": str(position)}, count) for position, count in by_position],
        )
        yield self._counter(
            "vllm:request_success",
            "Samples that ended, by why.",
            [({"finished_reason": reason}, count) for reason, count in sorted(self._finished.items())],
        )

    def _gauge(self, name: str, text: str, value: float) -> Any:
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(name, text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], value)
        return family

    def _counter(self, name: str, text: str, values: Iterable[tuple[Mapping[str, str], float]]) -> Any:
        from prometheus_client.core import CounterMetricFamily

        each = [({**self._labels, **labels}, value) for labels, value in values]
        family = CounterMetricFamily(name, text, labels=[*each[0][0]] if each else [*self._labels])
        for labels, value in each:
            family.add_metric([*labels.values()], value)
        return family


def summed(totals: Iterable[Totals]) -> Totals:
    """The counters of several engines together."""
    together = Totals()
    for one in totals:
        for name in (field.name for field in fields(Totals)):
            mine, more = getattr(together, name), getattr(one, name)
            both = mine + more if isinstance(mine, int) else [a + b for a, b in zip_longest(mine, more, fillvalue=0)]
            setattr(together, name, both)
    return together

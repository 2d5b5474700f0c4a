"""Adds vLLM's names to a metrics page, for dashboards, autoscalers and endpoint pickers that were made for vLLM.

With `--metrics-compat vllm` each process adds, to its own families, those of vLLM's that it can tell: a router times and workers
counts. A series has vLLM's labels: `model_name`, and `engine`, which is the id of the worker or router. Samples that differ only in
other labels are added up. Buckets of histograms are Transom's own: quantiles and heat maps read their bounds from the series.

Names are those of vLLM's documentation and of its published Grafana dashboards.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@dataclass(frozen=True, slots=True)
class Renamed:
    """A family of vLLM's, and the family that its samples come from.

    `labels` names vLLM's labels of what stays apart, by Transom's labels. With `only` (a label and its values) just these count.
    """

    name: str
    source: str
    labels: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, tuple[str, ...]] | None = None


RENAMED = (
    Renamed("num_requests_running", "requests_running"),
    Renamed("num_requests_waiting", "requests_waiting"),
    Renamed("kv_cache_usage_perc", "kv_utilization_ratio"),
    Renamed("num_preemptions", "preemptions"),
    Renamed("prefix_cache_queries", "prefix_tokens"),
    Renamed("prefix_cache_hits", "prefix_tokens", only=("outcome", ("hit",))),
    Renamed("prompt_tokens", "prompt_tokens"),
    Renamed("generation_tokens", "output_tokens"),
    Renamed(
        "request_success",
        "requests",
        labels={"finish_reason": "finished_reason"},
        only=("finish_reason", ("stop", "length", "abort", "error")),
    ),
    Renamed("request_prompt_tokens", "request_prompt_tokens"),
    Renamed("request_generation_tokens", "request_output_tokens"),
    Renamed("request_max_num_generation_tokens", "request_output_tokens"),  # each choice is a request of its own
    Renamed("iteration_tokens_total", "step_tokens"),
    Renamed("request_queue_time_seconds", "queue_seconds"),
    Renamed("request_prefill_time_seconds", "prefill_seconds"),
    Renamed("request_decode_time_seconds", "decode_seconds"),
    Renamed("time_to_first_token_seconds", "router_first_token_seconds"),
    Renamed("inter_token_latency_seconds", "router_inter_token_seconds"),
    Renamed("e2e_request_latency_seconds", "router_request_seconds", only=("endpoint", ENDPOINTS)),
)


def vllm_families(families: Mapping[str, Metric]) -> Iterator[Metric]:
    """Yield those of vLLM's families that come from `families`, which are given by name."""
    for renamed in RENAMED:
        if (family := families.get(f"transom_{renamed.source}")) is not None:
            yield _renamed(family, renamed)


def _renamed(family: Metric, renamed: Renamed) -> Metric:
    """Return a family with vLLM's name and labels."""

    def labels_of(labels: Mapping[str, str]) -> dict[str, str] | None:
        if renamed.only is not None and labels.get(renamed.only[0]) not in renamed.only[1]:
            return None
        names = {"model_name": labels["model"], "engine": labels.get("worker") or labels["router"]}
        return names | {own: labels[label] for label, own in renamed.labels.items()}

    return relabelled(family, f"vllm:{renamed.name}", labels_of)


def relabelled(family: Metric, name: str, labels_of: Callable[[Mapping[str, str]], dict[str, str] | None]) -> Metric:
    """Return a family under another name. `labels_of` maps a sample's labels to the new ones, or to None, which leaves the sample
    out; samples with equal new labels are added up."""
    totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in family.samples:
        labels = labels_of(sample.labels)
        if labels is None:
            continue
        if "le" in sample.labels:
            labels["le"] = sample.labels["le"]
        key = (sample.name.removeprefix(family.name), tuple(labels.items()))
        totals[key] = totals.get(key, 0.0) + sample.value
    made = Metric(name, f"{family.documentation} From {family.name}.", family.type)
    for (end, pairs), value in totals.items():
        made.add_sample(f"{made.name}{end}", dict(pairs), value)
    return made

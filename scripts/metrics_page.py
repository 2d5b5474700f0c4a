#!/usr/bin/env python3
"""Write docs/metrics.md: every family of metrics, read from a live engine and a live router's registry.

`make docs` runs it with the demo model; any model gives the same page.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from prometheus_client.core import Metric

from transom_cluster.telemetry.router_metrics import RouterMetrics
from transom_cluster.telemetry.router_state import RouterState
from transom_core.settings.settings import Settings
from transom_worker.engine.startup import build_engine

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "metrics.md"
INTRODUCTION = """# Metrics

*Written by `make docs` from the code.*

Counters end in `_total`. Histograms are shown with `_bucket`; all others are gauges. Series whose label values are known
beforehand are there, at 0, from the start, so `rate` and `increase` see the first event of a kind.
[Monitoring](monitoring.md#scraping) says how to scrape them.
"""
OWN_LABELS = ("model", "worker", "router")
# Labels whose values are few and always the same: the page names them, unless the family's text does.
LISTED = "cause change finish_reason forward judgement kind mode outcome part phase reason state target"

Sections = Mapping[str, str]  # title -> beginnings of names
OF_WORKERS: Sections = {
    "Requests": "requests request_ queue_ first_token decode_sec inter_token prefill_ output_t prompt_t",
    "Steps": "step computed out_of_memory",
    "Prefix cache": "prefix kv_repair kv_checkpoint kv_reuse kv_held",
    "KV pool": "kv_ preempt",
    "Grammars": "grammar_",
    "LoRA adapters": "lora_",
    "Load, as routers and the autoscaler see it": "load_",
    "Ranks": "rank_ decode_steps",
    "Disk tier": "disk_",
    "The process": "worker_ process_ build_",
}
OF_ROUTERS: Sections = {
    "Requests over HTTP": (
        "router_request router_first router_inter router_broken router_open router_prompt router_output"
    ),
    "Answers that are parsed": "router_tool router_degraded router_reasoning",
    "Where requests go": "router_placement router_predicted router_actual router_hit router_resync router_mirror",
    "Workers, and requests whose worker goes": (
        "router_w router_in_ router_fail router_suspects router_drain router_desired"
    ),
    "Pages and the process": "router_dropped router_process router_tasks build_",
}


def main() -> None:
    """Write the page."""
    engine = build_engine(Settings.parse(model="smollm2", kv_cache_memory_bytes="64MiB").engine_config())
    try:
        PAGE.write_text(page(engine.metrics.registry.collect(), router_families()))
    finally:
        engine.shutdown()
    print(f"{PAGE.relative_to(ROOT)} is written.")


def page(worker: Iterable[Metric], router: Iterable[Metric]) -> str:
    """The whole page: the introduction, and a table for each section."""
    parts = [
        INTRODUCTION,
        "## Workers\n\nEvery series has `model` and `worker`.\n",
        *_sections(worker, OF_WORKERS),
        "## Routers\n\nEvery series has `model` and `router`.\n",
        *_sections(router, OF_ROUTERS),
    ]
    return "\n".join(parts)


def router_families() -> list[Metric]:
    """All that a router can show."""
    state = RouterState(
        num_waiting=0,
        num_tasks=0,
        workers_by_state={"open": 1, "closed": 0, "draining": 0},
        in_flight_by_worker={"w": 0},
        workers_by_identity={"0123": 1},
        desired_workers=1,
    )
    metrics = RouterMetrics("r", model="m", state=lambda: state)
    metrics.requests.of("/v1/completions", "200")
    metrics.routing.joined("kv", "w")
    metrics.routing.mirror_changed("w", num_blocks=0, version=0)
    return list(metrics.registry.collect())


def _sections(families: Iterable[Metric], sections: Sections) -> Iterator[str]:
    left = {_shown_name(family): family for family in families}
    for title, beginnings in sections.items():
        names = [name for name in left if name.removeprefix("transom_").startswith(tuple(beginnings.split()))]
        rows = [_row(name, left.pop(name)) for name in names]
        yield "\n".join([f"### {title}\n", "| name | labels | |", "|---|---|---|", *rows, ""])
    if left:
        raise ValueError(
            f"{sorted(left)} belong to no section of docs/metrics.md; name one in scripts/metrics_page.py."
        )


def _shown_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def _row(name: str, family: Metric) -> str:
    values: dict[str, list[str]] = {}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label not in (*OWN_LABELS[:1], "le") and value not in values.setdefault(label, []):
                values[label].append(value)
    own = OWN_LABELS[2] if OWN_LABELS[2] in values else OWN_LABELS[1]
    text = family.documentation
    labels = "; ".join(_label(label, found, text) for label, found in values.items() if label != own)
    shown = f"{name}_bucket" if family.type == "histogram" else name
    return f"| `{shown}` | {labels} | {text} |"


def _label(label: str, values: Sequence[str], text: str) -> str:
    """The label, with its values if they are few and the family's text does not name all of them."""
    if label not in LISTED.split() or set(values) <= set(re.findall(r"\w+", text)):
        return f"`{label}`"
    return f"`{label}`: {', '.join(value or '(none)' for value in values)}"


if __name__ == "__main__":
    main()

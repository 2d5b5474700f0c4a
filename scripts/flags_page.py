#!/usr/bin/env python3
"""Write docs/flags.md: every setting of Transom, read from `Settings`, so that the page cannot contradict the code.

`make docs` runs it; a test fails while the page is out of date.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from transom_core.settings.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "flags.md"
INTRODUCTION = """# Flags

Every setting of Transom. `transom serve MODEL` takes them as flags, `LLM(...)` takes those of the engine as keywords
(`max_model_len=4096`), and the Serve YAML takes them under `args:` (`max_model_len: 4096`). Names that `vllm serve` users know
mean the same here. A setting that is on by default has a flag that turns it off: `--no-enable-prefix-caching`.

`make docs` writes this page from `worker/transom_core/settings/settings.py`.
"""
Section = tuple[str, tuple[str, ...]]  # title, settings
SECTIONS: Sequence[Section] = (
    (
        "Model",
        ("model", "served_model_name", "dtype", "device", "quantization", "max_model_len", "seed", "enforce_eager"),
    ),
    (
        "KV cache",
        (
            "block_size",
            "kv_cache_dtype",
            "kv_cache_memory_bytes",
            "gpu_memory_utilization",
            "enable_prefix_caching",
            "window_repair",
            "hybrid_kv_cache",
            "swap_space",
            "disk_cache",
            "disk_space",
            "kv_policy",
        ),
    ),
    ("Any model as a hybrid", ("window", "sinks", "chunk", "window_pattern")),
    (
        "Batching",
        (
            "max_num_seqs",
            "max_num_batched_tokens",
            "target_step_s",
            "max_waiting",
            "scheduling_policy",
            "max_priority",
            "steps_in_flight",
            "preemption_mode",
        ),
    ),
    ("Ranks", ("tensor_parallel_size", "num_threads", "step_timeout_s")),
    (
        "Workers and routers",
        (
            "replicas",
            "min_replicas",
            "max_replicas",
            "first_token_objective_s",
            "upscale_delay_s",
            "downscale_delay_s",
            "router_replicas",
            "routing_policy",
            "max_resumes",
            "max_lost_workers",
            "worker_wait_s",
            "role",
            "worker_group",
            "kv_transfer",
            "kv_transfer_timeout_s",
        ),
    ),
    ("Tools and reasoning", ("tool_call_parser", "enable_auto_tool_choice", "reasoning_parser")),
    (
        "HTTP",
        ("host", "port", "haproxy", "request_timeout_s", "max_body_bytes", "max_header_bytes", "allowed_origins"),
    ),
    (
        "Keys and limits",
        (
            "api_key",
            "api_key_file",
            "admin_api_key_file",
            "salt_by_key",
            "requests_per_minute",
            "concurrent_requests",
            "get_requests_per_minute",
            "concurrent_get_requests",
            "block_map_streams",
        ),
    ),
    ("Logs and traces", ("log_format", "log_prompts", "otlp_traces_endpoint", "trace_sample_ratio")),
)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(SECTIONS))
    print(f"{PAGE.relative_to(ROOT)} is written.")


def page(sections: Sequence[Section]) -> str:
    """The whole page: a table for each section.

    Raises:
        ValueError: a setting belongs to no section.
    """
    fields = dict(Settings.model_fields)
    parts = [INTRODUCTION]
    for title, names in sections:
        parts.append(_table(f"## {title}", [(name, fields.pop(name)) for name in names]))
    if fields:
        raise ValueError(f"{sorted(fields)} belong to no section of docs/flags.md; name one in scripts/flags_page.py.")
    return "\n".join(parts)


def _table(title: str, settings: Sequence[tuple[str, FieldInfo]]) -> str:
    rows = [
        f"| {_flag(name)} | {_default(field)} | {_values(name, field)} | {field.description} |"
        for name, field in settings
    ]
    return "\n".join([title, "", "| flag | default | values | meaning |", "|---|---|---|---|", *rows, ""])


def _flag(name: str) -> str:
    return "`MODEL`" if name == "model" else f"`--{name.replace('_', '-')}`"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default in (None, ()):
        return "unset"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return f"`{field.default}`"


def _values(name: str, field: FieldInfo) -> str:
    """The choices, or the kind of value and its limits."""
    annotation: Any = field.annotation
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)] or [annotation]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "text, repeatable"
    if name in ("kv_cache_memory_bytes", "disk_space"):
        return "bytes, or text such as `512MiB`"
    if name == "swap_space":
        return "GiB, or text such as `512MiB`"
    words = {int: "integer", float: "number", str: "text", bool: "on, off"}[kinds[0]]
    limits = [text for constraint in field.metadata for text in _limits(constraint)]
    return ", ".join([words, *limits])


def _limits(constraint: Any) -> Iterator[str]:
    for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if (limit := getattr(constraint, name, None)) is not None:
            yield f"{sign} {limit}"


if __name__ == "__main__":
    main()

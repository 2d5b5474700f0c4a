"""What a worker says when it is ready: where the memory went, and the cache's plan as `transom plan` has it."""

from __future__ import annotations

from transom_worker.execution.executor import ExecutorInfo
from transom_worker.kvcache.groups import GroupSpec
from transom_worker.planner import CachePlan, GroupPlan


def startup_report(info: ExecutorInfo, *, model: str) -> str:
    """A few lines for the log: memory by purpose, one line per group, how many sequences fit."""
    memory, plan = info.memory, info.plan
    pool_bytes = plan.page_bytes * plan.num_pages
    lines = [
        f"{model} on {memory.device}: weights {_mib(memory.weight_bytes)}, activations {_mib(memory.activation_bytes)}, "
        f"KV pool {_mib(pool_bytes)} ({plan.num_pages:,} pages of {plan.page_bytes:,} bytes, {plan.waste:.1%} waste)",
        *(_group_line(part, group.spec) for part, group in zip(plan.groups, plan.layout.groups, strict=True)),
        f"one sequence of {plan.max_model_len:,} tokens takes {plan.request_bytes:,} bytes; at once run {_ladder(plan)}",
    ]
    if plan.in_flight_bytes:
        lines.append(
            f"a step of {plan.max_num_batched_tokens:,} tokens takes {plan.in_flight_bytes:,} bytes more while it runs; "
            f"lost windows are restored by computing {plan.repair_tokens:,} tokens"
        )
    return "\n".join(lines)


def _group_line(part: GroupPlan, spec: GroupSpec) -> str:
    return (
        f"  group {part.name}: {part.num_layers} layers keep {_kept(spec)}; blocks of {part.block_tokens} tokens, "
        f"{part.block_bytes:,} bytes, {part.blocks_per_page} to a page; a sequence holds {part.peak_blocks:,} at most"
    )


def _kept(spec: GroupSpec) -> str:
    if spec.keeps_everything:
        return f"an entry per {spec.ratio} tokens" if spec.ratio else "all tokens"
    if spec.ratio:
        return f"up to {(1 + spec.overlap) * spec.ratio:,} tokens"
    sinks = f" + first {spec.sinks}" if spec.sinks else ""
    return f"{spec.window or spec.chunk:,} tokens{sinks}"


def _ladder(plan: CachePlan) -> str:
    return ", ".join(f"{point.requests:,} of {point.length:,}" for point in plan.concurrency)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"

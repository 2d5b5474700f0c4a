"""What a worker says when it is ready: where the memory went, and how much the KV pool holds."""

from __future__ import annotations

from transom_worker.execution.executor import ExecutorInfo
from transom_worker.kvcache.groups import GroupSpec
from transom_worker.kvcache.layout import ArenaLayout, GroupLayout


def blocks_at_length(spec: GroupSpec, num_tokens: int) -> int:
    """Blocks that one sequence of `num_tokens` holds in a group: those its live ranges touch, and one for the next token."""
    size = spec.block_size
    touched: set[int] = set()
    for start, end in spec.live(num_tokens):
        touched.update(range(start // size, -(-end // size)))
    touched.add(num_tokens // size)
    return len(touched)


def sequence_bytes(layout: ArenaLayout, num_tokens: int) -> int:
    """Bytes of the pool that one sequence of `num_tokens` holds over all groups."""
    return sum(blocks_at_length(group.spec, num_tokens) * group.stride_bytes for group in layout.groups)


def startup_report(info: ExecutorInfo, *, model: str) -> str:
    """A few lines for the log: memory by purpose, one line per group, tokens and concurrency."""
    memory, layout = info.memory, info.layout
    longest = info.max_model_len
    concurrency = layout.pool_bytes / max(1, sequence_bytes(layout, longest))
    lines = [
        f"{model} on {memory.device}: weights {_mib(memory.weight_bytes)}, activations {_mib(memory.activation_bytes)}, "
        f"KV pool {_mib(layout.pool_bytes)} ({layout.num_pages} pages of {layout.page_bytes // 1024} KiB)",
        *(_group_line(group) for group in layout.groups),
        f"the pool holds {int(concurrency * longest):,} tokens in sequences of {longest:,} ({concurrency:.1f} of them at once)",
    ]
    return "\n".join(lines)


def _group_line(group: GroupLayout) -> str:
    spec = group.spec
    kept = "all tokens" if spec.keeps_everything else f"{spec.window or spec.chunk:,} tokens"
    sinks = f" + first {spec.sinks}" if spec.sinks else ""
    return (
        f"  group {spec.name}: {len(spec.layers)} layers keep {kept}{sinks}; "
        f"blocks of {spec.block_size} tokens, {group.block_bytes:,} bytes"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"

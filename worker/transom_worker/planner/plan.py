"""Computes a `CachePlan`: how a model's KV cache uses a given amount of memory. `transom plan` prints it; the engine builds it.

    stride         the distance in bytes between the starts of a group's blocks: the block's bytes and their padding
    waste          the fraction of a page's bytes that a group's blocks cannot fill
    rank           one process of a tensor-parallel worker; the plan is that of rank 0, which holds most
    in flight      a token is in flight while the step that computes it has not answered; its blocks are not freed
    lag            tokens of one request that are in flight when its next token is planned: 1 with two steps in flight
    demand         the blocks, by group, that one request holds at one of its peaks (`peak_demands`)
    window repair  computing tokens again so that sliding windows can be restored at a cached prefix's end

Example: gpt-oss-20b (12 layers with full attention, 12 with a window of 128 tokens) in 10 GiB, blocks of 16 tokens. Both groups
have blocks of 384 KiB, so pages of 384 KiB waste nothing. A request of 32,768 tokens holds 32,768 / 16 = 2,048 blocks of the full
group and 9 of the window group: 771 MiB, so 13 such requests run at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from transom_core.kv_cache.groups import GroupSpec
from transom_core.kv_cache.layout import ArenaLayout, GroupLayout
from transom_core.kv_cache.retention import Retention
from transom_core.kv_cache.window_repair import repair_start
from transom_core.model_config.architecture import Architecture, choose_max_model_len, read_architecture
from transom_core.model_config.rank_shares import RankShare, rank_shares, replicated_parts
from transom_core.model_config.sharding import check_size
from transom_worker.planner.blocks import cache_groups
from transom_worker.planner.layer_groups import cache_format
from transom_worker.planner.pages import (
    group_waste,
    in_flight_blocks,
    make_host_layout,
    make_layout,
    max_requests,
    num_computed,
    peak_demands,
)

RetentionOf = Callable[[GroupSpec], Retention]
# A plan says how many requests fit for lengths of 1,024, 4,096, 16,384 ... tokens, and for `max_model_len`.
SHORTEST_LENGTH = 1024
LENGTH_FACTOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One group's blocks, and how many of them a request of `max_model_len` tokens holds if each step computes one token of it."""

    name: str
    kind: str
    num_layers: int
    dtype: str  # the number format of the group's keys and values, as --kv-cache-dtype names it
    block_tokens: int
    block_bytes: int
    bytes_per_token: float  # of a block, without padding
    stride_bytes: int
    blocks_per_page: int
    live_blocks: int  # held when the request ends
    peak_blocks: int  # the most that the request holds at any time
    # Further blocks that the engine, not each request, needs while a step of `max_num_batched_tokens` prompt tokens is in flight.
    in_flight_blocks: int
    waste: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """How many requests of `length` tokens, prompt and answer together, run at once without preemption.

    `requests` counts decoding requests and leaves no memory for prefill; the scheduler shortens prompt chunks when memory is short.
    `requests_with_budget` also leaves memory for a step of `max_num_batched_tokens` prompt tokens. `request_bytes` is what one
    request holds at its peak.
    """

    length: int
    requests: int
    requests_with_budget: int
    request_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """A model's KV cache on the rank that holds most: its pages, its groups, and how many requests fit."""

    memory_bytes: int
    kv_dtype: str  # the format of all groups, or each group's in the setting's syntax: full=int8,window_128=bfloat16
    tensor_parallel_size: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    page_bytes: int
    num_pages: int
    waste: float  # the largest waste of any group
    groups: tuple[GroupPlan, ...]
    request_bytes: int  # of all groups' `live_blocks`
    in_flight_bytes: int  # of all groups' `in_flight_blocks`
    repair_tokens: int  # computed by a window repair at the end of a cached prefix of `max_model_len - 1` tokens
    concurrency: tuple[Concurrency, ...]
    layout: ArenaLayout
    host_layout: ArenaLayout | None = None  # of the host tier: blocks and pages as in `layout`, another number of pages
    host_concurrency: tuple[Concurrency, ...] = ()  # requests whose KV fits the host tier; empty without a host tier
    ranks: tuple[RankShare, ...] = ()  # what each rank holds; empty with one rank, or before `with_rank_shares`
    replicated: tuple[str, ...] = ()  # what every rank holds in equal copies; empty in the same cases

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, without the layouts."""
        not_plain = ("layout", "host_layout", "groups", "concurrency", "host_concurrency", "ranks", "replicated")
        values = {name: getattr(self, name) for name in self.__slots__ if name not in not_plain}
        return values | {
            "groups": [asdict(group) for group in self.groups],
            "concurrency": [asdict(point) for point in self.concurrency],
            "host_concurrency": [asdict(point) for point in self.host_concurrency],
            "ranks": [share.as_json() for share in self.ranks],
            "replicated": list(self.replicated),
            "host_pages": self.host_layout.num_pages if self.host_layout else 0,
            "host_bytes": self.host_layout.pool_bytes if self.host_layout else 0,
        }


def plan_from_config(
    config: Mapping[str, Any],
    *,
    memory_bytes: int,
    block_size: int = 16,
    max_model_len: int | None = None,
    max_num_batched_tokens: int = 8192,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    hybrid: bool = True,
    steps_in_flight: int = 1,
    host_bytes: int = 0,
    retention_of: RetentionOf = Retention,
) -> CachePlan:
    """Return the plan for a `config.json`.

    `hybrid=False` keeps every token in every group. `steps_in_flight` is how many steps the engine runs at once before it has their
    answers. `host_bytes` is the memory of the host tier, 0 for none. `retention_of` says which tokens of a group requests keep; it
    differs from the default if requests have a KV policy.

    Raises:
        ModelError: the config is not understood.
        ConfigError: the length exceeds the model's, the model cannot be divided among that many ranks, a group cannot have its
            number format, or there is too little memory.
    """
    architecture = read_architecture(config)
    check_size(architecture, tensor_parallel_size)
    plan = plan_cache(
        cache_groups(
            architecture,
            block_size=block_size,
            dtype=architecture.served_dtype,
            kv_cache_dtype=kv_cache_dtype,
            tensor_parallel_size=tensor_parallel_size,
            hybrid=hybrid,
        ),
        memory_bytes=memory_bytes,
        block_size=block_size,
        max_model_len=choose_max_model_len(max_model_len, architecture),
        max_num_batched_tokens=max_num_batched_tokens,
        tensor_parallel_size=tensor_parallel_size,
        steps_in_flight=steps_in_flight,
        host_bytes=host_bytes,
        retention_of=retention_of,
    )
    return with_rank_shares(plan, architecture)


def with_rank_shares(plan: CachePlan, architecture: Architecture) -> CachePlan:
    """Return the plan with what each rank holds of the model; with one rank, the plan unchanged."""
    size = plan.tensor_parallel_size
    if size == 1:
        return plan
    return replace(plan, ranks=rank_shares(architecture, size), replicated=replicated_parts(architecture, size))


def plan_cache(
    groups: Sequence[GroupLayout],
    *,
    memory_bytes: int,
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    tensor_parallel_size: int = 1,
    steps_in_flight: int = 1,
    host_bytes: int = 0,
    retention_of: RetentionOf = Retention,
) -> CachePlan:
    """Return the plan for groups of blocks. `host_bytes` is the memory of the host tier, 0 for none; `retention_of` says which
    tokens of a group requests keep.

    The lag is `steps_in_flight - 1`: with two steps in flight, a block is freed one step later than with one, because the earlier
    step has not answered and may still read the block.

    Raises:
        ConfigError: the memory, or that of the host tier, cannot hold one page per group.
    """
    layout = make_layout(groups, memory_bytes)
    host_layout = make_host_layout(layout, host_bytes) if host_bytes else None
    lag = steps_in_flight - 1
    retentions = [retention_of(group.spec) for group in groups]
    in_flight = in_flight_blocks(retentions, max_num_batched_tokens)
    demands = peak_demands(retentions, max_model_len, block_size=block_size, lag=lag)
    live = [retention.allocated_blocks(num_computed(max_model_len) - 1, lag=lag) for retention in retentions]
    group_plans = tuple(
        _group_plan(layout, index, demands, live[index], in_flight[index]) for index in range(len(groups))
    )
    return CachePlan(
        memory_bytes=memory_bytes,
        kv_dtype=cache_format(groups),
        tensor_parallel_size=tensor_parallel_size,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        page_bytes=layout.page_bytes,
        num_pages=layout.num_pages,
        waste=max(group.waste for group in group_plans),
        groups=group_plans,
        request_bytes=_bytes_of(layout, live),
        in_flight_bytes=_bytes_of(layout, in_flight),
        repair_tokens=_repair_tokens(layout, max_model_len - 1),
        concurrency=tuple(
            _concurrency(layout, retentions, length, block_size, lag, in_flight)
            for length in _reported_lengths(max_model_len)
        ),
        layout=layout,
        host_layout=host_layout,
        host_concurrency=tuple(
            _concurrency(host_layout, retentions, length, block_size, 0, [0] * len(groups))
            for length in _reported_lengths(max_model_len)
        )
        if host_layout
        else (),
    )


def _group_plan(
    layout: ArenaLayout, index: int, demands: Sequence[Sequence[int]], live_blocks: int, in_flight: int
) -> GroupPlan:
    """Return the plan of the group with this index."""
    group = layout.groups[index]
    return GroupPlan(
        name=group.spec.name,
        kind=str(group.spec.kind),
        num_layers=len(group.spec.layers),
        dtype=group.format,
        block_tokens=group.spec.block_size,
        block_bytes=group.block_bytes,
        bytes_per_token=group.bytes_per_token,
        stride_bytes=group.stride_bytes,
        blocks_per_page=layout.blocks_per_page(index),
        live_blocks=live_blocks,
        peak_blocks=max(demand[index] for demand in demands),
        in_flight_blocks=in_flight,
        waste=group_waste(layout, index),
    )


def _concurrency(
    layout: ArenaLayout,
    retentions: Sequence[Retention],
    length: int,
    block_size: int,
    lag: int,
    in_flight: Sequence[int],
) -> Concurrency:
    """Return how many requests of `length` tokens fit; `in_flight` has, by group, the blocks of a whole step's prompt tokens."""
    demands = peak_demands(retentions, length, block_size=block_size, lag=lag)
    return Concurrency(
        length=length,
        requests=max_requests(layout, demands, once=[0] * len(in_flight)),
        requests_with_budget=max_requests(layout, demands, once=in_flight),
        request_bytes=max(_bytes_of(layout, demand) for demand in demands),
    )


def _repair_tokens(layout: ArenaLayout, boundary: int) -> int:
    """Return how many tokens a window repair computes at the end of a cached prefix of `boundary` tokens.

    The number is not rounded to blocks; the engine's repair begins up to one block earlier.
    """
    specs = [replace(group.spec, block_size=1) for group in layout.groups]
    return boundary - repair_start(specs, boundary)


def _bytes_of(layout: ArenaLayout, num_blocks: Sequence[int]) -> int:
    """Return the bytes of `num_blocks[group]` blocks of each group, padding included."""
    return sum(count * group.stride_bytes for count, group in zip(num_blocks, layout.groups, strict=True))


def _reported_lengths(longest: int) -> list[int]:
    """Return those of 1,024, 4,096, 16,384 ... that are below the longest length, and the longest length."""
    lengths = []
    length = SHORTEST_LENGTH
    while length < longest:
        lengths.append(length)
        length *= LENGTH_FACTOR
    return [*lengths, longest]

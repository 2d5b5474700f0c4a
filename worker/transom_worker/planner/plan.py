"""`CachePlan`: a model's KV cache in a given amount of memory, in integers. `transom plan` prints it, and the engine builds it.

group           model layers that keep the same tokens for the same time (`kvcache.groups`)
page            a part of the KV memory, leased to one group at a time
rank            one process of a tensor-parallel worker; the plan is that of the first rank, which holds most
window repair   computing tokens again so that sliding windows can be restored at a cached prefix's end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from transom_worker.kvcache.layout import ArenaLayout, GroupLayout
from transom_worker.kvcache.retention import Retention
from transom_worker.kvcache.window_repair import repair_start
from transom_worker.model_config.architecture import Architecture, choose_max_model_len, read_architecture
from transom_worker.model_config.rank_shares import RankShare, rank_shares, replicated_parts
from transom_worker.model_config.sharding import check_size
from transom_worker.planner.blocks import cache_groups, kv_dtype
from transom_worker.planner.concurrency import in_flight_blocks, max_requests, num_computed, peak_demands
from transom_worker.planner.pages import group_waste, make_layout

SHORTEST_LENGTH = 1024
LENGTH_STEP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One group. Numbers of blocks are those of one request of `max_model_len` tokens that is alone in a step."""

    name: str
    kind: str
    num_layers: int
    block_tokens: int
    block_bytes: int
    stride_bytes: int
    blocks_per_page: int
    live_blocks: int  # when the request ends
    peak_blocks: int  # at most, at any time
    in_flight_blocks: int  # beyond that for a whole step's tokens, once per engine
    waste: float  # fraction of a page that no block covers


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """How many requests of `length` tokens, prompt and answer together, run at once without preemption.

    `requests` counts decoding requests; chunks of prompts shrink where memory is short. `requests_with_budget` leaves memory for a
    step that is full of prompt chunks.
    """

    length: int
    requests: int
    requests_with_budget: int
    request_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """The plan of the rank that holds most."""

    memory_bytes: int
    kv_dtype: str
    tensor_parallel_size: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    page_bytes: int
    num_pages: int
    waste: float  # fraction of a full page that the worst group cannot use
    groups: tuple[GroupPlan, ...]
    request_bytes: int  # of one request of `max_model_len` tokens
    in_flight_bytes: int
    repair_tokens: int  # computed again to restore all windows at the last boundary of such a request
    concurrency: tuple[Concurrency, ...]
    layout: ArenaLayout
    ranks: tuple[RankShare, ...] = ()  # if there are several ranks and the model is known
    replicated: tuple[str, ...] = ()  # if there are several ranks and the model is known: what every rank holds

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, without the layout."""
        parts = ("layout", "groups", "concurrency", "ranks", "replicated")
        values = {name: getattr(self, name) for name in self.__slots__ if name not in parts}
        return values | {
            "groups": [asdict(group) for group in self.groups],
            "concurrency": [asdict(point) for point in self.concurrency],
            "ranks": [share.as_json() for share in self.ranks],
            "replicated": list(self.replicated),
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
) -> CachePlan:
    """Return the plan for a `config.json`.

    Raises:
        ModelError: the config is not understood.
        ConfigError: the length is beyond the model's, there are more ranks than can share it, the dtype is unknown, or memory is
        short.
    """
    architecture = read_architecture(config)
    check_size(architecture, tensor_parallel_size)
    dtype = kv_dtype(kv_cache_dtype, architecture.served_dtype)
    plan = plan_cache(
        cache_groups(
            architecture, block_size=block_size, dtype=dtype, tensor_parallel_size=tensor_parallel_size, hybrid=hybrid
        ),
        memory_bytes=memory_bytes,
        block_size=block_size,
        max_model_len=choose_max_model_len(max_model_len, architecture),
        max_num_batched_tokens=max_num_batched_tokens,
        tensor_parallel_size=tensor_parallel_size,
        kv_dtype=dtype,
        steps_in_flight=steps_in_flight,
    )
    return with_shares(plan, architecture)


def with_shares(plan: CachePlan, architecture: Architecture) -> CachePlan:
    """Return the plan with what each rank holds of the model, if there are several ranks."""
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
    kv_dtype: str,
    tensor_parallel_size: int = 1,
    steps_in_flight: int = 1,
) -> CachePlan:
    """Return the plan for groups of blocks. With `steps_in_flight` plans in flight, blocks are freed so many steps later, less one.

    Raises:
        ConfigError: the memory cannot hold one page per group.
    """
    layout = make_layout(groups, memory_bytes)
    lag = steps_in_flight - 1
    in_flight = in_flight_blocks(layout, max_num_batched_tokens)
    demands = peak_demands(layout, max_model_len, block_size=block_size, lag=lag)
    live = [Retention(group.spec).allocated_blocks(num_computed(max_model_len) - 1, lag=lag) for group in groups]
    parts = tuple(_group_plan(layout, index, demands, live[index], in_flight[index]) for index in range(len(groups)))
    return CachePlan(
        memory_bytes=memory_bytes,
        kv_dtype=kv_dtype,
        tensor_parallel_size=tensor_parallel_size,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        page_bytes=layout.page_bytes,
        num_pages=layout.num_pages,
        waste=max(part.waste for part in parts),
        groups=parts,
        request_bytes=_request_bytes(layout, live),
        in_flight_bytes=_request_bytes(layout, in_flight),
        repair_tokens=_repair_tokens(layout, max_model_len - 1),
        concurrency=tuple(
            _concurrency(layout, length, block_size, lag, in_flight) for length in _lengths(max_model_len)
        ),
        layout=layout,
    )


def _group_plan(
    layout: ArenaLayout, index: int, demands: Sequence[Sequence[int]], live_blocks: int, in_flight: int
) -> GroupPlan:
    group = layout.groups[index]
    return GroupPlan(
        name=group.spec.name,
        kind=str(group.spec.kind),
        num_layers=len(group.spec.layers),
        block_tokens=group.spec.block_size,
        block_bytes=group.block_bytes,
        stride_bytes=group.stride_bytes,
        blocks_per_page=layout.blocks_per_page(index),
        live_blocks=live_blocks,
        peak_blocks=max(demand[index] for demand in demands),
        in_flight_blocks=in_flight,
        waste=group_waste(layout, index),
    )


def _concurrency(layout: ArenaLayout, length: int, block_size: int, lag: int, in_flight: Sequence[int]) -> Concurrency:
    demands = peak_demands(layout, length, block_size=block_size, lag=lag)
    return Concurrency(
        length=length,
        requests=max_requests(layout, demands, once=[0] * len(in_flight)),
        requests_with_budget=max_requests(layout, demands, once=in_flight),
        request_bytes=max(_request_bytes(layout, demand) for demand in demands),
    )


def _repair_tokens(layout: ArenaLayout, boundary: int) -> int:
    """Return the tokens of a window repair at a boundary, counted without rounding to blocks: a real one begins up to a block
    earlier.
    """
    specs = [replace(group.spec, block_size=1) for group in layout.groups]
    return boundary - repair_start(specs, boundary)


def _request_bytes(layout: ArenaLayout, num_blocks: Sequence[int]) -> int:
    return sum(count * group.stride_bytes for count, group in zip(num_blocks, layout.groups, strict=True))


def _lengths(longest: int) -> list[int]:
    """Return 1k, 4k, 16k ... and the longest length."""
    lengths = []
    length = SHORTEST_LENGTH
    while length < longest:
        lengths.append(length)
        length *= LENGTH_STEP
    return [*lengths, longest]

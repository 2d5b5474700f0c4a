"""`describe_block`: describes one block in full, for the person who selects it on the block map's page.

It runs on the engine's thread, and searches all sequences and checkpoints. That is fast enough, since one person asks for one block
at a time.
"""

from typing import Any

from transom_core.clock import steady_time_s
from transom_core.kv_cache.layout import ArenaLayout
from transom_core.kv_cache.tiers import DEVICE, HOST
from transom_worker.kvcache.blocks.arena import FREE
from transom_worker.kvcache.blocks.block_table import BlockTable, StateTable
from transom_worker.kvcache.blocks.pool import GroupPool
from transom_worker.kvcache.manager import KvCache
from transom_worker.scheduling.scheduler import Scheduler

HASH_CHARS = 16


def describe_block(scheduler: Scheduler, group: int, block: int, tier: str = "device") -> dict[str, Any]:
    """Return the state of a block of a tier ("device" or "host"), what it holds, the sequences that use it, its prefix hash and its
    checkpoints; only `error` if there is no such block. A block on the device also has the time for which it has been cached."""
    cache, is_host = scheduler.cache, tier == "host"
    host = cache.tiers.host
    if is_host and not host.exists:
        return {"error": "This worker has no host tier."}
    layout, pools, arena = (
        (host.layout, host.pools, host.arena) if is_host else (cache.layout, cache.pools, cache.arena)
    )
    if error := _missing(layout, group, block):
        return {"error": error}
    pool, page, of_group = pools[group], arena.page_of(group, block), layout.groups[group]
    name = pool.published.get(block)
    users = _host_users(scheduler, group, block) if is_host else _users(scheduler, group, block)
    owner = arena.owner[page] if page < layout.num_pages else FREE
    is_leased, repairs = owner == group, not is_host and any(user["repair"] for user in users)
    described = {
        "state": _state(pool, block, is_leased=is_leased, is_host=is_host, repairs=repairs),
        "group": group,
        "name": of_group.spec.name,
        "block": block,
        "references": pool.refs[block],
        "sequences": users,
        "hash": None if name is None else name[0].hex()[:HASH_CHARS],
        "logical": None if name is None else name[1],
        "page": page,
        "page_group": None if owner == FREE else layout.groups[owner].spec.name,
        "first_byte": block * of_group.stride_bytes,
        "bytes": of_group.block_bytes,
        "tokens": of_group.spec.block_size,
        "checkpoints": [] if name is None else _checkpoints(cache, group, name[0], HOST if is_host else DEVICE),
        "time_s": steady_time_s(),
    }
    if is_host:
        return {"tier": "host", **described}
    is_cached = name is not None and not pool.refs[block]
    return described | {
        "logical": users[0]["logical"] if users else described["logical"],
        "cached_s": cache.registry.times[group].age_s(block) if is_cached else None,
    }


def _missing(layout: ArenaLayout, group: int, block: int) -> str:
    """Say what is wrong with the number of a group or block; "" if there is such a block."""
    if not 0 <= group < len(layout.groups):
        return f"There is no group {group}; this worker has {len(layout.groups)}, from 0 on."
    if not 0 <= block < layout.dump_block(group):
        return f"Group {group} has no block {block}; its blocks are 0 to {layout.dump_block(group) - 1}."
    return ""


def _host_users(scheduler: Scheduler, group: int, block: int) -> list[dict[str, Any]]:
    """Return the sequences that are being loaded from a block of the host tier, or are swapped into it."""
    held = [(one, one.swapped or one.blocks) for one in scheduler.by_request.values()]
    return [
        {"id": one.seq_id, "request": one.request.request_id, "processed": blocks.processed}
        for one, blocks in held
        if blocks is not None and blocks.load.host_blocks and block in blocks.load.host_blocks[group]
    ]


def _state(pool: GroupPool, block: int, *, is_leased: bool, is_host: bool, repairs: bool) -> str:
    """Return a block's state as frames tell it; whatever needs a host block, its state is "held"."""
    if not is_leased:
        return "gone"
    if pool.refs[block]:
        return "held" if is_host else "repair" if repairs else "active"
    if pool.pins[block]:
        return "held"
    return "loose" if block in pool.published else "empty"


def _users(scheduler: Scheduler, group: int, block: int) -> list[dict[str, Any]]:
    """Return the sequences that reference a block."""
    users = []
    for sequence in scheduler.sequences_with_blocks():
        blocks = sequence.blocks
        assert blocks is not None
        table = blocks.tables[group]
        if table.holds(block):
            users.append(
                {
                    "id": sequence.seq_id,
                    "request": sequence.request.request_id,
                    "logical": _logical(table, block),
                    "processed": blocks.processed,
                    "repair": blocks.processed < blocks.repair.end
                    and not blocks.retentions[group].keeps_everything
                    and block in table.run,
                }
            )
    return users


def _logical(table: BlockTable, block: int) -> int:
    """Return a block's logical index as frames tell it: a snapshot has that of the hash block at whose end it was taken."""
    if isinstance(table, StateTable):
        return table.places[table.run.index(block)]
    return table.logical_of(block)


def _checkpoints(cache: KvCache, group: int, digest: bytes, tier: int) -> list[dict[str, Any]]:
    """Return the checkpoints that pin a block in a tier: those whose windows have it, and the one whose segment has it."""
    return [
        {
            "kind": node.kind.value,
            "boundary_tokens": node.boundary * cache.block_size,
            "turns": node.num_returns,
            "running": node.locks,
            "part": part,
        }
        for node, part in cache.checkpoints.pinning_nodes(group, digest)
        if (node.tier if part == "chain" else node.windows_tier) == tier
    ]

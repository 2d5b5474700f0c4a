"""Describes one block in full, for the person who selects it on the block map's page. Runs on the engine's thread.

It may search all sequences and checkpoints, since one person asks for one block at a time.
"""

from __future__ import annotations

import time
from typing import Any

from transom_worker.kvcache.arena import FREE
from transom_worker.kvcache.manager import KvCache
from transom_worker.scheduling.scheduler import Scheduler

HASH_CHARS = 16


def describe_block(scheduler: Scheduler, group: int, block: int) -> dict[str, Any]:
    """A block's state, the sequences that use it, its prefix hash and its checkpoints; `error` alone where there is no such
    block."""
    cache = scheduler.cache
    layout = cache.layout
    if not 0 <= group < len(layout.groups):
        return {"error": f"There is no group {group}; this worker has {len(layout.groups)}, from 0 on."}
    if not 0 <= block < layout.dump_block(group):
        return {"error": f"Group {group} has no block {block}; its blocks are 0 to {layout.dump_block(group) - 1}."}
    pool, page = cache.pools[group], cache.arena.page_of(group, block)
    name = pool.published.get(block)
    users = _users(scheduler, group, block)
    owner = cache.arena.owner[page] if page < layout.num_pages else FREE
    return {
        "group": group,
        "name": layout.groups[group].spec.name,
        "block": block,
        "state": _state(
            scheduler, group, block, is_leased=owner == group, repairs=any(user["repair"] for user in users)
        ),
        "references": pool.refs[block],
        "sequences": users,
        "hash": None if name is None else name[0].hex()[:HASH_CHARS],
        "logical": users[0]["logical"] if users else None if name is None else name[1],
        "cached_s": cache.registry.cached_age_s(group, block) if name is not None and not pool.refs[block] else None,
        "page": page,
        "page_group": None if owner == FREE else layout.groups[owner].spec.name,
        "first_byte": block * layout.groups[group].stride_bytes,
        "bytes": layout.groups[group].block_bytes,
        "tokens": layout.groups[group].spec.block_size,
        "checkpoints": [] if name is None else _checkpoints(cache, group, name[0]),
        "time_s": time.time(),
    }


def _state(scheduler: Scheduler, group: int, block: int, *, is_leased: bool, repairs: bool) -> str:
    pool = scheduler.cache.pools[group]
    if not is_leased:
        return "gone"
    if pool.refs[block]:
        return "repair" if repairs else "active"
    if pool.pins[block]:
        return "held"
    return "loose" if block in pool.published else "empty"


def _users(scheduler: Scheduler, group: int, block: int) -> list[dict[str, Any]]:
    """The sequences that reference a block."""
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
                    "logical": table.logical_of(block),
                    "processed": blocks.processed,
                    "repair": blocks.processed < blocks.repair_until
                    and not blocks.retentions[group].keeps_everything
                    and block in table.run,
                }
            )
    return users


def _checkpoints(cache: KvCache, group: int, digest: bytes) -> list[dict[str, Any]]:
    """The checkpoints that pin a block: those whose windows have it, and the one whose part of the prefix chain it is in."""
    return [
        {
            "kind": node.kind.value,
            "boundary_tokens": node.boundary * cache.block_size,
            "turns": node.num_returns,
            "running": node.locks,
            "part": part,
        }
        for node, part in cache.checkpoints.pinning_nodes(group, digest)
    ]

"""`RetentionSet`: which blocks a sequence must keep, in every KV cache group at once.

Most sequences of a cache have the same set: the `Retention` of each group's own kind. A sequence with a KV policy (a request's
own rule for what its full-attention layers keep) has another one, so one group may be a full group to one sequence and a
sliding group to another.
"""

from __future__ import annotations

from collections.abc import Iterable

from transom_core.kv_cache.groups import GroupSpec
from transom_core.kv_cache.retention import Retention


class RetentionSet(tuple[Retention, ...]):
    """One `Retention` per group. Not thread-safe, since retentions have a table that grows on use.

    `full_groups` has (group, hash blocks per block) of each full group, `sliding_groups` (group, sink blocks) of the others.
    """

    full_groups: list[tuple[int, int]]
    sliding_groups: list[tuple[int, int]]
    specs: tuple[GroupSpec, ...]

    @classmethod
    def of(cls, retentions: Iterable[Retention], *, block_size: int) -> RetentionSet:
        """Build the set from one retention per group; `block_size` is that of a hash block in tokens."""
        made = cls(retentions)
        made.full_groups = [(i, one.block_size // block_size) for i, one in enumerate(made) if one.keeps_everything]
        made.sliding_groups = [(i, one.num_sink_blocks) for i, one in enumerate(made) if not one.keeps_everything]
        made.specs = tuple(one.spec for one in made)
        return made

    @property
    def slides(self) -> bool:
        """Return whether there is a sliding group."""
        return bool(self.sliding_groups)

"""`KvShares`: which KV heads the blocks of each rank of a worker contain, as workers tell each other for a KV transfer."""

from dataclasses import dataclass

from transom_core.kv_cache.layout import GroupLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShares:
    """What the blocks of a worker's ranks contain: `groups[rank]` are that rank's groups, and `heads[rank][layer]` is the range
    (first, end) of its KV heads, counted over the whole model. `states[rank][layer]` is that of a recurrent layer's heads."""

    groups: tuple[tuple[GroupLayout, ...], ...]
    heads: tuple[tuple[tuple[int, int], ...], ...]
    states: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.groups)

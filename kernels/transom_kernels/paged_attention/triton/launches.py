"""Plans the Triton launches of a batch once a step; all layers with the same launch key share the plan.

A *launch key* is everything besides the batch on which the plan depends. In an eager step, each attention layer asks for its
launches, and the first layer with a key plans them for all layers with this key. A replayed CUDA graph runs no Python, so the
graph's owner plans instead of the layers:

    launches_of(batch, key, device)       eager step: each attention layer
    keys = launch_keys_of(batch)          graph's owner: after a warm-up step, in which all layers have run
    set_launches(batch, key, launches)    graph's owner: for each key, before a capture; before each replay it rewrites the work
                                          items of these launches in place

A batch has a launch per `Tiling`: for sequences with one new token, with a few, and with a chunk of a prompt. Where the partial
results of a launch would take more than `MAX_PARTIAL_BYTES`, it has several in turn.
"""

from dataclasses import dataclass, field

import torch

from transom_kernels.paged_attention.inputs import PagedBatch
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.paged_attention.triton.tuning import MAX_PARTIAL_BYTES, tilings
from transom_kernels.paged_attention.triton.work_items import Tiling, Work, plan_work

_SCRATCH_KEY = "paged_attention_gpu"  # of `PagedBatch.scratch`


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchKey:
    """Everything besides the batch that launches depend on. Layers with equal keys share their launches."""

    rule: MaskRule
    group: int  # query heads per KV head
    kv_heads: int  # of the rank that has most
    key_size: int  # elements of a key
    value_size: int  # elements of a value
    element_bytes: int  # bytes of one number of a query
    cache_bytes: int  # bytes of one number in the KV cache
    multiprocessors: int  # of the device

    @property
    def tilings(self) -> tuple[Tiling, ...]:
        """The tilings for one, a few and many new tokens of a sequence; the first one is for decoding."""
        names = ("group", "kv_heads", "key_size", "element_bytes", "cache_bytes", "multiprocessors")
        return tilings(**{name: getattr(self, name) for name in names})

    @property
    def most_partials(self) -> int:
        """The most partial results of a launch: for each, every query head has a value, a maximum and a sum in float32."""
        return max(1, MAX_PARTIAL_BYTES // (4 * self.group * self.kv_heads * (self.value_size + 2)))


@dataclass(slots=True)
class AttentionLaunch:
    """One launch of the `attend` kernel: all sequences of one tiling."""

    work: Work
    max_tile_tokens: int  # query tokens of the tiling's largest tile
    num_items: int = field(init=False)
    num_combine_items: int = field(init=False)

    def __post_init__(self) -> None:
        """Count items once, since every layer's launch asks for their number."""
        self.num_items, self.num_combine_items = len(self.work.items), len(self.work.combine_items)


def launches_of(batch: PagedBatch, key: LaunchKey, device: torch.device) -> list[AttentionLaunch]:
    """Return the batch's launches for layers with this key; the first call plans them, and the batch keeps them."""
    planned = _launches(batch)
    found = planned.get(key)  # once, since hashing the key takes time
    if found is None:
        found = planned[key] = [
            AttentionLaunch(part.on(device), tiling.tile_tokens)
            for tiling in key.tilings
            if any(tiling.min_new_tokens <= count <= tiling.max_new_tokens for count in batch.count_host)
            for part in plan_work(batch, key.rule, tiling).parts(key.most_partials)
        ]
    return found


def set_launches(batch: PagedBatch, key: LaunchKey, launches: list[AttentionLaunch]) -> None:
    """Make layers with this key use these launches instead of planning their own."""
    _launches(batch)[key] = launches


def launch_keys_of(batch: PagedBatch) -> tuple[LaunchKey, ...]:
    """Return the keys of all layers that have computed attention over this batch so far."""
    return tuple(_launches(batch))


def _launches(batch: PagedBatch) -> dict[LaunchKey, list[AttentionLaunch]]:
    planned: dict[LaunchKey, list[AttentionLaunch]] = batch.scratch.setdefault(_SCRATCH_KEY, {})
    return planned

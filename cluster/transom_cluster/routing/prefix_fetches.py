"""Decides whether a worker should fetch a cached prefix from another worker or compute it. Pure; docs/kv_tiers.md has figures.

- **source**: the worker with the longest hit in its memory among those that may be asked. It does not offer blocks that only its
  disk has.
- **target**: the worker that would run the request. It need not fetch what it has itself.
- **live blocks**: the blocks that a sequence needs to continue after the prefix: all blocks of full groups, and the last ones of
  windows. So a fetch takes `fixed_bytes` for the windows, and `token_bytes` for each token that the target lacks. A request with
  the KV policy `window` needs only its window (and sinks) of every group.

The rule: let `s` be the seconds to compute the tokens that a fetch saves, and `f` the seconds to fetch them (a wait, and the bytes
at a rate: both as the target has measured them from the source's node and tier). The target fetches if `s >= MARGIN * f`. A
target that fetched the last time continues to fetch while `s >= f`: measured rates vary, and without this *hysteresis* equal
requests would alternate between both ways. A prompt that a prefill worker has handed over is fetched in any case.

For example, with a prompt of 8,000 tokens, 5,000 prefill tokens per second, 2 KB per token in the full groups, windows of 4 MB and
1 GB/s, `s` is 1.6 s and `f` is 0.01 s + (4 MB + 16 MB) / (1 GB/s) = 0.03 s, so the target fetches. For 100 tokens `s` is 0.02 s and
`f` is 0.014 s; 0.02 < MARGIN * 0.014, so it computes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transom_cluster.routing.fleet_index import Hits
from transom_cluster.routing.index_code import Integers
from transom_cluster.routing.policy import Candidates, prefill_rates
from transom_cluster.routing.worker_table import Selection
from transom_cluster.routing.worker_view import WorkerView
from transom_core.contract import FetchSpeed, PrefixSource, Request, WindowPolicy

# A fetch must be faster than computing by this factor, since it takes part of another worker's and of the network's time.
MARGIN = 1.5

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

PREFILL_RATE = 3  # a row of `Candidates.facts`


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetches:
    """For each worker of a selection: whether it should fetch the prefix (`pays`), at which token it would then start to compute
    (`start`), and the seconds of the fetch.

    `source` is the worker that has the prefix, at the `place` (`PrefixSource.place`); None if there is none. `was_asked` is true
    for workers that could fetch something.
    """

    source: WorkerView | None
    place: str = ""
    start: Integers
    seconds: Floats
    was_asked: Flags
    pays: Flags

    @classmethod
    def none(cls, selection: Selection) -> Fetches:
        """Return the result that no worker fetches anything."""
        count = len(selection.workers)
        never = np.zeros(count, np.bool_)
        return cls(source=None, start=np.zeros(count, np.int64), seconds=np.zeros(count), was_asked=never, pays=never)

    def source_of(self, position: int) -> PrefixSource | None:
        """Return what the worker at this position should fetch; None if nothing."""
        if self.source is None or not self.pays[position]:
            return None
        return PrefixSource(worker=self.source.worker_id, num_tokens=int(self.start[position]), place=self.place)


def find_fetches(
    request: Request, selection: Selection, hits: Hits, candidates: Candidates, *, sources: Collection[str], turn: int
) -> Fetches:
    """Find the source with the longest hit, and decide for each other worker whether it should fetch from there.

    `candidates` has the workers' facts without any fetch. Sources with equal hits take turns, by `turn`.
    """
    positions = [selection.positions[one] for one in sources]
    positions = [one for one in positions if selection.can_fetch[one]]
    if not positions:
        return Fetches.none(selection)
    found = hits.memory_start[positions]
    best = [one for one, start in zip(positions, found, strict=True) if start == found.max()]
    at = min(best) if len(best) == 1 else sorted(best)[turn % len(best)]
    source, start = selection.workers[at], int(hits.memory_start[at])
    lacking = start - hits.memory_start
    equal = np.array([has_equal_blocks(worker, source) for worker in selection.workers])
    was_asked = selection.can_fetch & equal & (lacking > 0)
    if not was_asked.any():
        return Fetches.none(selection)
    # A prefix may lie in two tiers; the place names the one that has most of it.
    place = source.place(is_on_device=2 * int(hits.device_start[at]) >= start)
    speeds = [worker.fetch_speed(place) for worker in selection.workers]
    seconds = fetch_times_s(source, start, lacking, speeds, window_of(request))
    spared_s = (start - hits.start) / prefill_rates(candidates.facts[PREFILL_RATE]) + candidates.extra_s
    fetched_last = np.array([worker.fetched_last for worker in selection.workers])
    # A prompt that was handed over comes from the prefill worker in any case: it would be computed twice.
    is_handover = len(request.resumed_output_ids) == 1 and not selection.may_decode[at]
    return Fetches(
        source=source,
        place=place,
        start=np.where(was_asked, start, hits.start),
        seconds=seconds,
        was_asked=was_asked,
        pays=was_asked & (is_handover | pays(spared_s, seconds, fetched_last)),
    )


def has_equal_blocks(one: WorkerView, other: WorkerView) -> bool:
    """Return whether blocks of two workers hold the same tokens of the same layers of the same model, with any number of ranks."""
    ours, theirs = one.mirror.shape, other.mirror.shape
    if ours is theirs:
        return True
    return (ours.identity, ours.block_size, ours.groups) == (theirs.identity, theirs.block_size, theirs.groups)


def window_of(request: Request) -> WindowPolicy | None:
    """Return the request's KV policy if it is a window, else None: no other policy has blocks in the prefix cache."""
    return request.kv_policy if isinstance(request.kv_policy, WindowPolicy) else None


def fetch_times_s(
    source: WorkerView, start: int, num_tokens: Integers, speeds: Sequence[FetchSpeed], window: WindowPolicy | None
) -> Floats:
    """Return for each target the seconds to fetch the prefix up to `start`, of which it lacks `num_tokens` tokens.

    `speeds` has the targets' speeds, and `window` is the request's KV policy.
    """
    fixed_bytes, token_bytes = prefix_bytes(source, start, window)
    waits_s, rates = np.array(speeds).T
    times_s: Floats = waits_s + (fixed_bytes + token_bytes * num_tokens) / rates
    return times_s


def prefix_bytes(source: WorkerView, num_tokens: int, window: WindowPolicy | None = None) -> tuple[int, float]:
    """Return the bytes of a prefix's live blocks: the bytes of all sliding groups together, and the bytes per token of the full
    groups.

    Under a request's `window` all groups are sliding groups.
    """
    rules = source.mirror.rules_under(window)
    boundary = num_tokens // rules.shape.block_size
    live = rules.live_blocks(boundary)
    fixed_bytes, token_bytes = 0, 0.0
    for spec, count, block_bytes in zip(rules.shape.groups, live, source.block_bytes, strict=True):
        if spec.keeps_everything:
            token_bytes += block_bytes / spec.block_size
        else:
            fixed_bytes += count * block_bytes
    return fixed_bytes, token_bytes


def pays(computing_s: Floats, fetching_s: Floats, fetched_last: Flags) -> Flags:
    """Return for each target whether it should fetch, by the rule in the module's docstring."""
    is_worth: Flags = computing_s >= np.where(fetched_last, 1.0, MARGIN) * fetching_s
    return is_worth

"""Divides a step's limit of prompt tokens (`prompt_pace`) among the prompts that are computed or wait.

There are two aims: a short prompt does not wait for all chunks of a long one, and no prompt starves. So the oldest prompt gets
at least half of the limit. Shorter prompts, the one with the fewest tokens first, share the rest. What they do not need is the
oldest one's.

Example with a limit of 200 tokens: the oldest prompt has 1,500 tokens left, and prompts of 60, 900 and 30 tokens wait. The
prompts of 30 and 60 tokens are computed whole, the one of 900 begins with 10 tokens, and the oldest one gets 100. Where all
prompts are equal, the oldest one gets the whole limit.
"""

from __future__ import annotations

from collections.abc import Sequence

QUANTUM = 16  # tokens that a waiting prompt starts with where only prompts after it have a share


def share_limit(limit: int, needs: Sequence[int], *, num_running: int) -> list[int]:
    """Return how many tokens each prompt gets.

    `needs` are the tokens that the prompts still have to compute: first those of the running prompts in order, of which the
    first is the oldest, then those of waiting ones, in the queue's order. A waiting prompt can be admitted only after those
    before it, so these get `QUANTUM` tokens, even beyond the limit, where one after them has a share.
    """
    if not needs:
        return []
    shares = [0] * len(needs)
    shorter = [at for at in range(1, len(needs)) if needs[at] < needs[0]]
    left = limit - min(needs[0], max(1, limit - limit // 2))
    for at in sorted(shorter, key=lambda at: needs[at]):
        shares[at] = min(needs[at], left)
        left -= shares[at]
    shares[0] = min(needs[0], limit - sum(shares))
    left = limit - sum(shares)
    for at in range(1, len(needs)):  # in order: what even the oldest does not need
        more = min(needs[at] - shares[at], left)
        shares[at] += more
        left -= more
    has_share_behind = False
    for at in reversed(range(max(1, num_running), len(needs))):
        if not shares[at] and has_share_behind:
            shares[at] = min(needs[at], QUANTUM)
        has_share_behind = has_share_behind or shares[at] > 0
    return shares

"""How a limit is divided: among clients by their weights (`divide`), and among the prompts of one client (`share_limit`).

Shares of prompts inside a client have two aims: a short prompt does not wait for all chunks of a long one, and no prompt starves.
So the oldest prompt gets at least half of the limit. Shorter prompts share the rest, the one with the fewest tokens first. The
oldest prompt also gets what they do not need. Example with a limit of 200 tokens: the oldest prompt has 1,500 tokens left, and
prompts of 60, 900 and 30 tokens wait. The prompts of 30 and 60 tokens are computed whole, the one of 900 begins with 10 tokens, and
the oldest one gets 100. If all prompts are equally long, the oldest one gets the whole limit.
"""

from collections.abc import Sequence as Sequences

QUANTUM = 16  # tokens that a waiting prompt starts with where only prompts after it have a share


def share_limit(limit: int, needs: Sequences[int], *, num_running: int) -> list[int]:
    """Return how many tokens each prompt gets.

    `needs` are the tokens that the prompts still have to compute: first those of the `num_running` running prompts in order, of
    which the first is the oldest, then those of waiting ones, in the queue's order. A waiting prompt can be admitted only after
    those before it. So if it has a share and one before it has none, that one gets `QUANTUM` tokens, even beyond the limit.
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
    for at in range(1, len(needs)):  # what even the oldest one does not need is given to the others, in order
        more = min(needs[at] - shares[at], left)
        shares[at] += more
        left -= more
    has_share_after = False
    for at in reversed(range(max(1, num_running), len(needs))):
        if not shares[at] and has_share_after:
            shares[at] = min(needs[at], QUANTUM)
        has_share_after = has_share_after or shares[at] > 0
    return shares


def divide(limit: int, needs: Sequences[int], weights: Sequences[float]) -> list[int]:
    """Divide a limit among clients by their weights; what one does not need is given to the others. Each gets at least one.

    Example: 100 tokens, needs of 10, 500 and 500, and weights of 1, 1 and 2: 10, 30 and 60.
    """
    shares, left, left_weight = [0] * len(needs), limit, sum(weights)
    # Clients that need the least for their weight come first: what they leave of their shares is there for all after them. 1e-9
    # makes up for rounding errors of the quotient.
    for at in sorted(range(len(needs)), key=lambda at: needs[at] / weights[at]):
        shares[at] = max(1, min(needs[at], int(left * weights[at] / left_weight + 1e-9)))
        left -= shares[at]
        left_weight -= weights[at]
    return shares

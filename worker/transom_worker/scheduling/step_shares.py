"""`StepShares`: how much of a step each sequence may use, so that no client makes another one's steps long.

Prompts share a step's prompt tokens (`share_limit`). If several clients have work, a step is also divided among them:

- *Tokens.* Each client that has prompts gets its share of the step's tokens; what it does not need is the others' (`divide`).
- *Time.* `prompt_pace` knows what rows and prompt tokens cost. A step takes at most `LONGEST` times as long as it would if no
  client had more work than an *ordinary* one: one that decodes `ORDINARY_ROWS` sequences, or uses as much time as the median
  client. What this leaves beside the fixed time of a step is divided by the clients' weights, and what one does not need is the
  others'. The sequences of a client that wants more take turns: those go first that have waited for longest. On a device on
  which rows cost nothing, none has to wait.
- *Savings.* A client keeps what it does not use of its share of the time, up to that of `SAVED_STEPS` steps, for its next prompts.
  So a client that sends a prompt now and then has it computed at once, and one that always has prompts is held to its share. A row
  may cost more than what is left: then the client has a debt, and its sequences wait until its shares have paid it.

For `GUEST_STEPS` after the last step of another client, one that is alone makes room for it as for one sequence: the request of
somebody who waits for each answer would else begin with the wait for a long step.

Example: a step takes 15 ms and 1.4 ms a row. A decodes one sequence, B 63. If B were ordinary, it would take 15 + 5 x 1.4 = 22
ms, so it may take 33 ms. A needs 1.4 of the 18 beside the fixed time, and B gets rows for 12 of its sequences, in turns.

Shares of prompts inside a client have two aims: a short prompt does not wait for all chunks of a long one, and no prompt starves.
So the oldest prompt gets at least half of the limit. Shorter prompts share the rest, the one with the fewest tokens first. The
oldest prompt also gets what they do not need. Example with a limit of 200 tokens: the oldest prompt has 1,500 tokens left, and
prompts of 60, 900 and 30 tokens wait. The prompts of 30 and 60 tokens are computed whole, the one of 900 begins with 10 tokens, and
the oldest one gets 100. If all prompts are equally long, the oldest one gets the whole limit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from itertools import islice

from transom_worker.scheduling.admission import AdmissionControl
from transom_worker.scheduling.clients import Client
from transom_worker.scheduling.prompt_pace import DecodeCosts, PromptPace
from transom_worker.scheduling.sequence import Sequence, SequenceStatus
from transom_worker.scheduling.step import StepPlan

MAX_SHARING = 32  # waiting prompts that may have a share of one step
QUANTUM = 16  # tokens that a waiting prompt starts with where only prompts after it have a share
ORDINARY_ROWS = 4
LONGEST = 1.5  # what a step's time does not count (messages, noise) has the rest of twice as long
SAVED_STEPS = 16
GUEST_STEPS = 8
MOST_DEBT_STEPS = 256  # more is forgotten: it may come from a wrong estimate
USED_WEIGHT = 1 / 32  # of the newest step in the average of what a client uses
REPLAYED_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows of steps that only decode and in which some wait: few, since each number is recorded when it first occurs."""


@dataclass(slots=True, eq=False)
class _Account:
    """A client's savings, below 0 for a debt, its average use, and its share of the step that was divided last, all in seconds."""

    saved_s: float
    used_s: float
    share_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Work:
    """What one client could compute in a step, what that costs, and what the client is granted, in seconds."""

    client: Client
    decodes: list[Sequence] = field(default_factory=list)  # running ones with one token to compute
    prompts: list[Sequence] = field(default_factory=list)  # running ones with more
    waiting: list[Sequence] = field(default_factory=list)
    decode_s: float = 0.0
    prompt_s: float = 0.0
    granted_s: float = 0.0
    most_tokens: float = math.inf  # of its prompts

    @property
    def all_prompts(self) -> list[Sequence]:
        """The running prompts, then the waiting ones."""
        return [*self.prompts, *self.waiting]


class StepShares:
    """Divides steps: `of_step` before a step is planned, `planned` after it.

    `max_chunk` is the most tokens of one sequence in a step; None: there is no such limit.
    """

    def __init__(
        self, admission: AdmissionControl, pace: PromptPace, *, max_num_seqs: int, max_chunk: int | None
    ) -> None:
        self._admission, self._pace = admission, pace
        self._max_num_seqs, self._max_chunk = max_num_seqs, max_chunk
        self._num_steps = 0
        self._guest_until = 0  # the last step with room for a client that had work not long ago
        self._works: list[_Work] = []  # of the step that is planned, if its time is divided
        self._accounts: dict[str, _Account] = {}  # of clients that have work, or have less than the most savings

    def of_step(self, num_tokens: int) -> dict[Sequence, int] | None:
        """Return how many tokens sequences may compute in this step of at most `num_tokens`; None for no limit.

        A prompt is a sequence with more than one token to compute; one that is not in the result gets no token. A sequence that
        decodes gets its token unless the result has 0 for it. There is no limit if the only prompt delays no other request;
        without a target time, there is none either if all prompts are of one client and no time is divided.
        """
        self._num_steps += 1
        self._works = []
        is_alone = len(self._admission.clients) <= 1 and self._num_steps > self._guest_until
        if is_alone and self._pace.target_s is None:
            return None
        works = self._gather()
        shares = {} if is_alone else self._divide_time(works)
        num_decoding = sum(len(work.decodes) for work in works) - len(shares)
        with_prompts = [work for work in works if work.all_prompts]
        prompts = [one for work in with_prompts for one in work.all_prompts]
        if not prompts or (len(prompts) == 1 and len(works) == 1 and not num_decoding):
            return shares or None
        oldest = next((one for one in prompts if one.status is SequenceStatus.RUNNING), prompts[0])
        paced = self._pace.limit(oldest.scheduled, decodes=num_decoding > 0)
        limit: float = math.inf if paced is None else paced
        if len(with_prompts) > 1:
            limit = min(limit, max(1, num_tokens - num_decoding))  # each decoding sequence needs one token of the step
            wanted = [
                int(min(sum(map(self._most_tokens, work.all_prompts)), work.most_tokens)) for work in with_prompts
            ]
            limits: Sequences[float] = divide(int(limit), wanted, [work.client.weight for work in with_prompts])
        else:
            limits = [limit]
        if math.inf in limits and with_prompts[0].most_tokens == math.inf and not shares:
            return None
        for work, of_client in zip(with_prompts, limits, strict=True):
            most = min(of_client, work.most_tokens)
            needs = [one.num_ready for one in work.all_prompts]
            own = needs if most == math.inf else share_limit(int(most), needs, num_running=len(work.prompts))
            shares |= zip(work.all_prompts, own, strict=True)
        return shares

    def planned(self, plan: StepPlan, rows: Iterable[Sequence]) -> None:
        """Charge the clients for a step whose time was divided; `rows` are the sequences of the plan's rows."""
        if not self._works:
            return
        costs, used_s = self._pace.decode_costs, defaultdict[str, float](float)
        for sequence, start, count in zip(rows, plan.start, plan.count, strict=True):
            row_s = costs.of_rows(1, start) if count == 1 else count * self._pace.token_s(start)
            used_s[sequence.request.client] += row_s
        granted_s = {work.client.name: work.granted_s for work in self._works}
        for name, account in list(self._accounts.items()):
            most_s = SAVED_STEPS * account.share_s
            saved_s = account.saved_s + max(granted_s.get(name, 0.0), account.share_s) - used_s[name]
            account.saved_s = max(-MOST_DEBT_STEPS * account.share_s, min(most_s, saved_s))
            account.used_s += USED_WEIGHT * (used_s[name] - account.used_s)
            if name not in granted_s and saved_s >= most_s:
                del self._accounts[name]

    def _gather(self) -> list[_Work]:
        """Return what each client could compute in a step, for those that can compute anything."""
        works: dict[Client, _Work] = {}
        of = self._admission.clients.of
        for one in self._admission.running:
            ready = one.num_ready
            if ready > 0 and one.status is SequenceStatus.RUNNING:
                client = of(one)
                work = works.get(client) or works.setdefault(client, _Work(client))
                (work.decodes if ready == 1 else work.prompts).append(one)
        for one in self._next_waiting():
            works.setdefault(of(one), _Work(of(one))).waiting.append(one)
        return list(works.values())

    def _next_waiting(self) -> list[Sequence]:
        """Return waiting sequences that may be admitted in this step: up to the number of free slots from each client, and one of a
        client without a slot, which may claim one.

        At most `MAX_SHARING` in all; clients in the order of their turns.
        """
        admission = self._admission
        num_free_slots = max(0, self._max_num_seqs - admission.num_running_slots_used)
        clients = [one for one in admission.clients.next_waiting(MAX_SHARING) if not admission.is_blocked(one)]
        num_each = min(num_free_slots, MAX_SHARING // max(1, len(clients)))
        return [one for client in clients for one in islice(client.queue, max(num_each, int(not client.num_slots)))]

    def _most_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens of a prompt a step could compute if there were no other request."""
        return min(sequence.num_ready, self._max_chunk or sequence.num_ready)

    def _divide_time(self, works: list[_Work]) -> dict[Sequence, int]:
        """Grant each client its share of the step's time, and limit what it computes by that; return 0 for the rows that wait."""
        costs, token_s = self._pace.decode_costs, self._pace.token_s
        if len(works) > 1:
            self._guest_until = self._num_steps + GUEST_STEPS
        if not works or not any(costs):  # nothing was measured
            return {}
        self._works = works
        for work in works:
            work.decode_s = costs.of_rows(len(work.decodes), sum(one.scheduled for one in work.decodes))
            work.prompt_s = sum(self._most_tokens(one) * token_s(one.scheduled) for one in work.all_prompts)
        free_s = self._free_time(works, costs)
        wanted_us = [int(1e6 * (work.decode_s + work.prompt_s)) for work in works]
        if sum(wanted_us) <= 1e6 * free_s:
            for work, wanted in zip(works, wanted_us, strict=True):
                work.granted_s = wanted / 1e6
            return {}
        granted_us = divide(int(1e6 * free_s), wanted_us, [work.client.weight for work in works])
        for work, granted in zip(works, granted_us, strict=True):
            work.granted_s = granted / 1e6
        # If all are in debt, nothing would be computed: as many steps' shares are granted as the first one needs.
        saved_s = [self._accounts[work.client.name].saved_s for work in works]
        num_missing = min(-saved / work.granted_s for saved, work in zip(saved_s, works, strict=True))
        if num_missing >= 1:
            for work in works:
                work.granted_s *= 1 + math.floor(num_missing)
        chosen = {work.client: self._limit(work, costs) for work in works}
        if not any(work.all_prompts for work in works):
            self._round(works, chosen)
        return {one: 0 for work in works for one in work.decodes if one not in chosen[work.client]}

    def _free_time(self, works: list[_Work], costs: DecodeCosts) -> float:
        """Return the time of a step that clients may use, and set their shares of it."""
        ordinary_s = ORDINARY_ROWS * costs.row_s
        for work in works:
            if work.client.name not in self._accounts:
                self._accounts[work.client.name] = _Account(math.inf, ordinary_s)
        accounts = [self._accounts[work.client.name] for work in works]
        used_s = sorted(account.used_s for account in accounts)
        if len(works) == 1:
            used_s.insert(0, costs.row_s)  # the guest's
        ordinary_s = max(ordinary_s, used_s[(len(used_s) - 1) // 2])
        free_s = LONGEST * (costs.fixed_s + sum(min(one, ordinary_s) for one in used_s)) - costs.fixed_s
        weight = sum(work.client.weight for work in works) + (len(works) == 1)
        for work, account in zip(works, accounts, strict=True):
            account.share_s = free_s * work.client.weight / weight
            account.saved_s = min(account.saved_s, SAVED_STEPS * account.share_s)
        return free_s

    def _limit(self, work: _Work, costs: DecodeCosts) -> dict[Sequence, None]:
        """Limit a client's prompts to what it may use, and return the sequences that get their rows, in the order of their turns.

        Rows may use the savings of one step, prompts all. If the client has both, each gets half, or what the other does not need.
        """
        account = self._accounts[work.client.name]
        allowed_s = work.granted_s + account.saved_s
        if allowed_s <= 0:
            work.most_tokens = 0
            return {}
        rows_s = max(allowed_s - work.prompt_s, allowed_s / 2 if work.decodes else 0.0)
        rows_s = min(rows_s, work.granted_s + min(account.saved_s, account.share_s))
        if work.decode_s <= rows_s:
            chosen, spent_s = dict.fromkeys(work.decodes), work.decode_s
        else:
            chosen, spent_s = {}, 0.0
            for one in sorted(work.decodes, key=lambda one: one.sampled_step):
                if spent_s >= rows_s:
                    break
                chosen[one] = None
                spent_s += costs.of_rows(1, one.scheduled)
        if work.all_prompts:
            token_s = self._pace.token_s(work.all_prompts[0].scheduled) or math.inf
            num_quanta = (allowed_s - spent_s) / token_s // QUANTUM
            work.most_tokens = QUANTUM * max(1, int(num_quanta)) if allowed_s > spent_s else 0
        return chosen

    @staticmethod
    def _round(works: list[_Work], chosen: dict[Client, dict[Sequence, None]]) -> None:
        """Let some more rows wait, of the client with the most, so that a step has one of `REPLAYED_ROWS` rows."""
        if all(len(work.decodes) == len(chosen[work.client]) for work in works):
            return
        num_rows = sum(map(len, chosen.values()))
        most = max(chosen.values(), key=len)
        size = max((size for size in REPLAYED_ROWS if size <= num_rows), default=num_rows)
        for _ in range(min(num_rows - size, len(most) - 1)):
            most.popitem()


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

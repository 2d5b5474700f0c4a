"""`StepShares`: how much of a step each sequence may use, so that no client makes another one's steps long.

Prompts share a step's prompt tokens (`share_limit`). If several clients have work, a step is also divided among them:

- *Tokens.* Each client that has prompts gets its share of the step's tokens; what it does not need is the others' (`divide`).
- *Time.* `prompt_pace` knows what rows and prompt tokens cost. A step takes at most `LONGEST` times as long as it would if no
  client had more work than an *ordinary* one: one that decodes `ORDINARY_ROWS` sequences, or uses as much time as the median
  client does on average. This holds for the rows that decode in each step, and for these and prompts on average. What it leaves
  beside the fixed time of a step is divided by the clients' weights, and what one does not need is the others'. The sequences of
  a client that wants more take turns: those go first that have waited for longest. On a device on which rows cost nothing,
  none has to wait.
- *Savings.* A client keeps what it does not use of its share of the time, up to that of `SAVED_STEPS` steps, for its next prompts.
  So a client that sends a prompt now and then has it computed at once, and one that always has prompts is held to its share: it
  saves for pieces of `LEAST_TOKENS`, between which steps are short. A row may cost more than what is left: then the client has a
  debt, and its sequences wait until its shares have paid it.

Once in `PROBE_STEPS` a step *is* as if all clients were ordinary: each computes up to `ORDINARY_ROWS` rows and no prompts. So it is
known what such a step takes even if the clients never stop sending more.

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
from transom_worker.scheduling.prompt_pace import FIRST_TOKENS, LEAST_TOKENS, DecodeCosts, PromptPace
from transom_worker.scheduling.sequence import Sequence, SequenceStatus
from transom_worker.scheduling.step import StepPlan

MAX_SHARING = 32  # waiting prompts that may have a share of one step
QUANTUM = 16  # tokens that a waiting prompt starts with where only prompts after it have a share
ORDINARY_ROWS = 4
LONGEST = 1.5  # what a step's time does not count (messages, noise) has the rest of twice as long
SAVED_STEPS = 16
GUEST_STEPS = 8
PROBE_STEPS = 128
MOST_DEBT_STEPS = 256  # more is forgotten: it may come from a wrong estimate
USED_WEIGHT = 1 / 32  # of the newest step in the average of what a client uses
REPLAYED_ROWS = (*range(1, 8), *range(8, 16, 2), *range(16, 32, 4), *range(32, 64, 8), *range(64, 257, 16))
"""Numbers of rows of steps that only decode and in which some wait: few, since each number is recorded when it first occurs."""


@dataclass(slots=True, eq=False)
class _Account:
    """A client's savings, below 0 for a debt, and its average use, its share of the step that was divided last, and the most that
    it may save; all in seconds."""

    saved_s: float
    rows_s: float  # used by rows that decode
    used_s: float  # used by these and prompts
    credit_s: float = (
        0.0  # what its rows did not use of what they were granted in the last step, below 0 if they used more
    )
    share_s: float = 0.0
    most_s: float = 0.0

    def bounded(self, left_s: float, most_s: float) -> float:
        """Return what is left of a client's time, at most `most_s`, or its debt."""
        return max(-MOST_DEBT_STEPS * self.share_s, min(most_s, left_s))


@dataclass(slots=True, eq=False)
class _Work:
    """What one client could compute in a step, what that costs, and what the client is granted for rows that decode and in all, in
    seconds."""

    client: Client
    decodes: list[Sequence] = field(default_factory=list)  # running ones with one token to compute
    prompts: list[Sequence] = field(default_factory=list)  # running ones with more
    waiting: list[Sequence] = field(default_factory=list)
    decode_s: float = 0.0
    prompt_s: float = 0.0
    rows_s: float = 0.0
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
        self._num_turns = 0  # that sequences had
        self._probe_at = 0  # the next step with ordinary clients
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
        is_timed = bool(shares) or any(work.most_tokens < math.inf for work in with_prompts)
        if not prompts or (len(prompts) == 1 and len(works) == 1 and not (num_decoding or is_timed)):
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
        elif limit == math.inf and not is_timed:
            return None
        else:
            limits = [limit]
        for work, of_client in zip(with_prompts, limits, strict=True):
            needs = [one.num_ready for one in work.all_prompts]
            most = min(of_client, work.most_tokens)
            own = needs if most == math.inf else share_limit(int(most), needs, num_running=len(work.prompts))
            if work.most_tokens < math.inf:  # what shares exceed the limit by would be others' time
                own = [max(0, min(share, int(most) - sum(own[:at]))) for at, share in enumerate(own)]
            shares |= zip(work.all_prompts, own, strict=True)
        return shares

    def planned(self, plan: StepPlan, rows: Iterable[Sequence]) -> None:
        """Charge the clients for a step whose time was divided; `rows` are the sequences of the plan's rows."""
        if not self._works:
            return
        costs, rows_s, used_s = self._pace.decode_costs, defaultdict[str, float](float), defaultdict[str, float](float)
        for sequence, start, count in zip(rows, plan.start, plan.count, strict=True):
            if count == 1:
                rows_s[sequence.request.client] += costs.of_rows(1, start)
            else:
                used_s[sequence.request.client] += count * self._pace.token_s(start)
        granted_s = {work.client.name: work.granted_s for work in self._works}
        for name, account in list(self._accounts.items()):
            used_s[name] += rows_s[name]
            saved_s = account.saved_s + max(granted_s.get(name, 0.0), account.share_s) - used_s[name]
            account.saved_s = account.bounded(saved_s, account.most_s)
            account.rows_s += USED_WEIGHT * (rows_s[name] - account.rows_s)
            account.used_s += USED_WEIGHT * (used_s[name] - account.used_s)
            if name not in granted_s and saved_s >= account.most_s:
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
        if not works or not self._pace.has_measured:
            return {}
        if self._num_steps >= self._probe_at and any(work.decodes for work in works):
            self._probe_at = self._num_steps + PROBE_STEPS
            for work in works:
                work.most_tokens = 0
            return self._others_wait(
                works, {one.client: _in_turns(one.decodes)[:ORDINARY_ROWS] for one in works}, costs
            )
        if not any(costs):  # no decoding was measured
            return {}
        self._works = works
        for work in works:
            work.decode_s = costs.of_rows(len(work.decodes), sum(one.scheduled for one in work.decodes))
            work.prompt_s = sum(self._most_tokens(one) * token_s(one.scheduled) for one in work.all_prompts)
        rows_s, free_s = self._free_times(works, costs)
        rows_us = [int(1e6 * work.decode_s) for work in works]
        wanted_us = [int(1e6 * (work.decode_s + work.prompt_s)) for work in works]
        if sum(rows_us) <= 1e6 * rows_s and sum(wanted_us) <= 1e6 * free_s:
            for work, wanted in zip(works, wanted_us, strict=True):
                work.granted_s = wanted / 1e6
            return {}
        weights = [work.client.weight for work in works]
        divided = zip(
            divide(int(1e6 * rows_s), rows_us, weights), divide(int(1e6 * free_s), wanted_us, weights), strict=True
        )
        for work, (rows, granted) in zip(works, divided, strict=True):
            work.rows_s, work.granted_s = rows / 1e6 + self._accounts[work.client.name].credit_s, granted / 1e6
        # If nobody could compute anything, as many steps' shares are granted as the first one needs.
        num_missing = max(0, math.ceil(min(self._missing_s(work) / work.granted_s for work in works)))
        for work, rows in zip(works, rows_us, strict=True):
            work.rows_s += num_missing * rows / 1e6
            work.granted_s *= 1 + num_missing
        chosen = {work.client: self._limit(work, costs) for work in works}
        if not any(work.all_prompts for work in works):
            _round(works, chosen)
        return self._others_wait(works, chosen, costs)

    def _free_times(self, works: list[_Work], costs: DecodeCosts) -> tuple[float, float]:
        """Return the time of a step that rows that decode may use, and the time that these and prompts may; set clients' shares."""
        ordinary_s = ORDINARY_ROWS * costs.row_s
        for work in works:
            if work.client.name not in self._accounts:
                self._accounts[work.client.name] = _Account(math.inf, ordinary_s, ordinary_s)
        accounts = [self._accounts[work.client.name] for work in works]
        free_s = []
        for used_s in ([account.rows_s for account in accounts], [account.used_s for account in accounts]):
            if len(works) == 1:
                used_s.append(costs.row_s)  # the guest's
            most_s = max(ordinary_s, sorted(used_s)[(len(used_s) - 1) // 2])
            free_s.append(LONGEST * (costs.fixed_s + sum(min(one, most_s) for one in used_s)) - costs.fixed_s)
        weight = sum(work.client.weight for work in works) + (len(works) == 1)
        for work, account in zip(works, accounts, strict=True):
            account.share_s = free_s[1] * work.client.weight / weight
            account.most_s = max(SAVED_STEPS * account.share_s, LEAST_TOKENS * self._pace.token_s(0))
            account.saved_s = min(account.saved_s, account.most_s)
        return free_s[0], free_s[1]

    def _limit(self, work: _Work, costs: DecodeCosts) -> list[Sequence]:
        """Limit a client's prompts to what it may use, and return the sequences that get their rows, in the order of their turns.

        Only prompts may use savings. So that they get some, rows get at most half of what is granted if the client has prompts.
        """
        account = self._accounts[work.client.name]
        allowed_s = work.granted_s + account.saved_s
        if allowed_s <= 0:
            work.most_tokens = 0
            return []
        rows_s = work.rows_s
        if allowed_s >= work.decode_s + work.prompt_s:
            if work.decode_s <= rows_s:
                return work.decodes
        elif work.all_prompts:
            rows_s = min(rows_s, work.granted_s / 2)
        if work.decode_s <= rows_s:
            chosen, spent_s = work.decodes, work.decode_s
        else:
            chosen, spent_s = [], 0.0
            for one in _in_turns(work.decodes):
                if spent_s >= rows_s:
                    break
                chosen.append(one)
                spent_s += costs.of_rows(1, one.scheduled)
        if work.all_prompts:
            token_s, left_s = self._pace.token_s(work.all_prompts[0].scheduled), allowed_s - spent_s
            work.most_tokens = left_s // token_s if token_s else FIRST_TOKENS
            if left_s < self._piece_s(work):
                work.most_tokens = 0
        return chosen

    def _piece_s(self, work: _Work) -> float:
        """Return the cost of the least piece of a client's prompts that is computed: all of them, or `LEAST_TOKENS`."""
        return min(work.prompt_s, LEAST_TOKENS * self._pace.token_s(work.all_prompts[0].scheduled))

    def _missing_s(self, work: _Work) -> float:
        """Return the time that a client lacks to compute anything in this step; 0 or less if it can."""
        lacking_s = -work.granted_s - self._accounts[work.client.name].saved_s
        return max(lacking_s, -work.rows_s) + 1e-6 if work.decodes else lacking_s + self._piece_s(work)

    def _others_wait(
        self, works: list[_Work], chosen: dict[Client, list[Sequence]], costs: DecodeCosts
    ) -> dict[Sequence, int]:
        """Note that the chosen sequences had their turns, and what they left; return 0 for the others."""
        waiting: dict[Sequence, int] = {}
        for work in works:
            own = chosen[work.client]
            if len(own) == len(work.decodes):
                continue
            account = self._accounts.get(work.client.name)
            if account is not None:
                spent_s = costs.of_rows(len(own), sum(one.scheduled for one in own))
                account.credit_s = account.bounded(work.rows_s - spent_s, account.share_s)
            for one in own:
                self._num_turns += 1
                one.last_turn = self._num_turns
            waiting |= dict.fromkeys(set(work.decodes).difference(own), 0)
        return waiting


def _round(works: list[_Work], chosen: dict[Client, list[Sequence]]) -> None:
    """Let some more rows wait, of the client with the most, so that a step has one of `REPLAYED_ROWS` rows."""
    num_rows = sum(map(len, chosen.values()))
    if num_rows == sum(len(work.decodes) for work in works):
        return
    most = max(chosen.values(), key=len)
    size = max((size for size in REPLAYED_ROWS if size <= num_rows), default=num_rows)
    del most[max(1, len(most) - (num_rows - size)) :]


def _in_turns(decodes: list[Sequence]) -> list[Sequence]:
    """Return sequences in the order of their turns: those first that had none, or have waited for longest since their last one."""
    return sorted(decodes, key=lambda one: one.last_turn)


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

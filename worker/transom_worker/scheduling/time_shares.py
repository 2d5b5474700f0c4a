"""`TimeShares`: how much of a step's time each client may use, so that no client makes another one's steps long.

`prompt_pace` knows what rows and prompt tokens cost. A step takes at most `LONGEST` times as long as it would if no client had more
work than an *ordinary* one: one that decodes `ORDINARY_ROWS` sequences, or uses as much time as the median client does on average.
This holds for the rows that decode in each step, and for these and prompts on average. What it leaves beside the fixed time of a
step is divided by the clients' weights, and what one does not need is the others'. On a device on which rows cost nothing, none has
to wait.

- *Turns.* The sequences of a client that wants more rows than its share take turns: those go first that have waited for longest.
  The last row may cost more than what is left of the share; that is taken from the next one (`_Account.credit_s`).
- *Savings.* A client keeps what it does not use of its share for its next prompts, up to that of `SAVED_STEPS` steps, or up to the
  cost of the least piece of its next prompt (`PromptPace.least_tokens`). So a client that sends a prompt now and then has it
  computed at once, and one that always has prompts saves for such pieces, between which steps are short. It has a debt if it used
  more than it had.
- *Probes.* Once in `PROBE_STEPS` a step *is* as if all clients were ordinary: each computes up to `ORDINARY_ROWS` rows and no
  prompts. So it is known what such a step takes even if the clients never stop sending more.
- *Guests.* For `GUEST_STEPS` after the last step of several clients, one that is alone makes room as for one sequence more: the
  next request of a client that waits for each answer would else begin with the wait for a long step. A client whose requests can
  compute nothing yet, as while their blocks are loaded, counts as absent.

Example: a step takes 15 ms and 1.4 ms a row. A decodes one sequence, B 63. If B were ordinary, it would take 15 + 5 x 1.4 = 22
ms, so it may take 30 ms. A needs 1.4 of the 15 beside the fixed time, and B gets rows for 10 of its sequences, in turns.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence as Sequences
from dataclasses import dataclass, field
from heapq import nsmallest

from transom_core.virtual_time import MAX_ACCOUNTS
from transom_worker.scheduling.clients import Client
from transom_worker.scheduling.dividing import divide
from transom_worker.scheduling.prompt_pace import DecodeCosts, PromptPace
from transom_worker.scheduling.sequence import Sequence
from transom_worker.scheduling.step import StepPlan

ORDINARY_ROWS = 4
# With 1.5, random clients (`test_step_shares`) made others' mean gaps up to 2.2 times as long, since costs are estimates.
LONGEST = 1.35
SAVED_STEPS = 12
GUEST_STEPS = 8
PROBE_STEPS = 128
MOST_DEBT_STEPS = 256  # more is forgotten: it may come from a wrong estimate
USED_WEIGHT = 1 / 32  # of the newest step in the average of what a client uses
REPLAYED_ROWS = (*range(1, 8), *range(8, 16, 2), *range(16, 32, 4), *range(32, 64, 8), *range(64, 257, 16))
"""Numbers of rows of steps that only decode and in which some wait: few, since each number is recorded when it first occurs."""


@dataclass(slots=True, eq=False)
class _Account:
    """A client's savings, below 0 for a debt, its average use, and its share of the step that was divided last, in seconds."""

    saved_s: float
    rows_s: float  # used by rows that decode
    used_s: float  # used by these and prompts
    # What its rows did not use of what they were granted in the last step, below 0 if they used more.
    credit_s: float = 0.0
    share_s: float = 0.0
    most_s: float = 0.0  # that it may save

    def bounded(self, left_s: float, most_s: float) -> float:
        """Return what is left of a client's time, at most `most_s`, or its debt."""
        return max(-MOST_DEBT_STEPS * self.share_s, min(most_s, left_s))


@dataclass(slots=True, eq=False)
class ClientWork:
    """What one client could compute in a step, what that costs, and what the client is granted for rows that decode and in all, in
    seconds."""

    client: Client
    decodes: list[Sequence] = field(default_factory=list)  # running ones with one token to compute
    prompts: list[Sequence] = field(default_factory=list)  # with more: `num_running` running ones, then waiting ones
    num_running: int = 0
    decode_s: float = 0.0
    prompt_s: float = 0.0
    rows_s: float = 0.0
    granted_s: float = 0.0
    most_tokens: float = math.inf  # that its prompts may compute


class TimeShares:
    """Divides the time of steps, if `is_on`: `begin_step` before a step is planned, `planned` after it."""

    def __init__(self, pace: PromptPace, *, is_on: bool) -> None:
        self._pace, self._is_on = pace, is_on
        self._num_steps = 0
        self._num_turns = 0  # that sequences had
        self._probe_at = 0  # the next step with ordinary clients
        self._guest_until = 0  # the last step with room for a client that had work not long ago
        self._works: list[ClientWork] = []  # of the step that is planned, if its time is divided
        self._accounts: dict[str, _Account] = {}  # of clients that have work, or have less than the most savings

    @property
    def has_guest(self) -> bool:
        """Whether the next step makes room for another client even if only one has work."""
        return self._num_steps < self._guest_until

    def begin_step(self, works: list[ClientWork]) -> dict[Sequence, int]:
        """Divide a step's time: set `most_tokens` where a client's prompts are limited, and return 0 for each row that waits."""
        self._num_steps += 1
        self._works = []
        if len(works) > 1:
            self._guest_until = self._num_steps + GUEST_STEPS
        is_shared = self._is_on and works and self._num_steps <= self._guest_until
        if not (is_shared and self._pace.has_measured):
            return {}
        if self._num_steps >= self._probe_at and any(work.decodes for work in works):
            self._probe_at = self._num_steps + PROBE_STEPS
            for work in works:
                work.most_tokens = 0
            return self._take_turns(works, [_in_turns(work.decodes)[:ORDINARY_ROWS] for work in works])
        return self._divide(works) if any(self._pace.decode_costs) else {}

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

    def _divide(self, works: list[ClientWork]) -> dict[Sequence, int]:
        """Grant each client its share of the step's time, and limit what it computes by that; return 0 for the rows that wait."""
        costs, token_s = self._pace.decode_costs, self._pace.token_s
        self._works = works
        for work in works:
            work.decode_s = costs.of_rows(len(work.decodes), sum(one.scheduled for one in work.decodes))
            work.prompt_s = sum(one.num_ready * token_s(one.scheduled) for one in work.prompts)
        accounts = self._accounts_of(works, costs)
        rows_s, free_s = self._free_times(works, accounts, costs)
        wants_rows_s = [work.decode_s for work in works]
        wants_s = [work.decode_s + work.prompt_s for work in works]
        if sum(wants_rows_s) <= rows_s and sum(wants_s) <= free_s:
            for work, wanted_s in zip(works, wants_s, strict=True):
                work.granted_s = wanted_s
            return {}
        weights = [work.client.weight for work in works]
        divided = zip(_divide_s(rows_s, wants_rows_s, weights), _divide_s(free_s, wants_s, weights), strict=True)
        for work, account, (granted_rows_s, granted_s) in zip(works, accounts, divided, strict=True):
            work.rows_s, work.granted_s = granted_rows_s + account.credit_s, granted_s
        # If no client could compute anything, as many steps' shares are granted as the first one needs.
        missing = (
            self._missing_s(work, account) / work.granted_s for work, account in zip(works, accounts, strict=True)
        )
        num_missing = max(0, math.floor(min(missing)) + 1)
        for work in works:
            work.rows_s += num_missing * work.decode_s
            work.granted_s *= 1 + num_missing
        chosen = [self._limit(work, account, costs) for work, account in zip(works, accounts, strict=True)]
        if not any(work.prompts for work in works):
            _round(works, chosen)
        for work, account, own in zip(works, accounts, chosen, strict=True):
            spent_s = costs.of_rows(len(own), sum(one.scheduled for one in own))
            account.credit_s = account.bounded(work.rows_s - spent_s, account.share_s)
        return self._take_turns(works, chosen)

    def _accounts_of(self, works: list[ClientWork], costs: DecodeCosts) -> list[_Account]:
        """Return the clients' accounts; with too many, those with the most savings are forgotten, as `VirtualTime` does."""
        if len(self._accounts) + len(works) > MAX_ACCOUNTS:
            least = nsmallest(MAX_ACCOUNTS // 2, self._accounts.items(), key=lambda item: item[1].saved_s)
            self._accounts = dict(least)
        ordinary_s = ORDINARY_ROWS * costs.row_s
        names = [work.client.name for work in works]
        return [self._accounts.setdefault(name, _Account(math.inf, ordinary_s, ordinary_s)) for name in names]

    def _free_times(self, works: list[ClientWork], accounts: list[_Account], costs: DecodeCosts) -> tuple[float, float]:
        """Return the time of a step that rows that decode may use, and the time that these and prompts may; set clients' shares."""
        ordinary_s = ORDINARY_ROWS * costs.row_s
        free_s = []
        for used_s in ([account.rows_s for account in accounts], [account.used_s for account in accounts]):
            if len(works) == 1:
                used_s.append(costs.row_s)  # the guest's
            most_s = max(ordinary_s, sorted(used_s)[(len(used_s) - 1) // 2])
            free_s.append(LONGEST * (costs.fixed_s + sum(min(one, most_s) for one in used_s)) - costs.fixed_s)
        weight = sum(work.client.weight for work in works) + (len(works) == 1)
        for work, account in zip(works, accounts, strict=True):
            account.share_s = free_s[1] * work.client.weight / weight
            # A prompt's next piece may cost more than many shares.
            next_s = self._least_s(work.prompts[0].scheduled if work.prompts else 0)
            account.most_s = max(SAVED_STEPS * account.share_s, next_s)
            account.saved_s = min(account.saved_s, account.most_s)
        return free_s[0], free_s[1]

    def _limit(self, work: ClientWork, account: _Account, costs: DecodeCosts) -> list[Sequence]:
        """Limit a client's prompts to what it may use, and return the sequences that get their rows, in the order of their turns.

        Only prompts may use savings. So that they get some, rows get at most half of what is granted if prompts have to wait.
        """
        allowed_s = work.granted_s + account.saved_s
        if allowed_s <= 0:
            work.most_tokens = 0
            return []
        rows_s = work.rows_s
        if work.prompts and allowed_s < work.decode_s + work.prompt_s:
            rows_s = min(rows_s, work.granted_s / 2)
        chosen, left_s = list(work.decodes), allowed_s - work.decode_s
        if work.decode_s > rows_s:
            chosen, spent_s = [], 0.0
            for one in _in_turns(work.decodes):
                if spent_s >= rows_s:
                    break
                chosen.append(one)
                spent_s += costs.of_rows(1, one.scheduled)
            left_s = allowed_s - spent_s
        if left_s < self._piece_s(work):
            work.most_tokens = 0
        elif left_s < work.prompt_s:
            work.most_tokens = left_s // self._pace.token_s(work.prompts[0].scheduled)
        return chosen

    def _piece_s(self, work: ClientWork) -> float:
        """Return the cost of the least piece of a client's prompts that is computed: all of them, or what is worth a step."""
        return min(work.prompt_s, self._least_s(work.prompts[0].scheduled)) if work.prompts else 0.0

    def _least_s(self, context: int) -> float:
        return self._pace.least_tokens(context) * self._pace.token_s(context)

    def _missing_s(self, work: ClientWork, account: _Account) -> float:
        """Return the time that a client lacks to compute anything in this step; below 0 if it can."""
        lacking_s = -work.granted_s - account.saved_s
        return max(lacking_s, -work.rows_s) if work.decodes else lacking_s + self._piece_s(work)

    def _take_turns(self, works: list[ClientWork], chosen: list[list[Sequence]]) -> dict[Sequence, int]:
        """Note that the chosen sequences have their turns where others wait; return 0 for these others."""
        waiting: dict[Sequence, int] = {}
        for work, own in zip(works, chosen, strict=True):
            if len(own) == len(work.decodes):
                continue
            for one in own:
                self._num_turns += 1
                one.last_turn = self._num_turns
            waiting |= dict.fromkeys(set(work.decodes).difference(own), 0)
        return waiting


def _divide_s(limit_s: float, needs_s: Sequences[float], weights: Sequences[float]) -> list[float]:
    """Divide seconds, whole nanoseconds of them: a row takes microseconds of a GPU, and each client's needs are above 0."""
    needs_ns = [math.ceil(1e9 * need_s) for need_s in needs_s]
    return [share_ns / 1e9 for share_ns in divide(int(1e9 * limit_s), needs_ns, weights)]


def _round(works: list[ClientWork], chosen: list[list[Sequence]]) -> None:
    """Let some more rows wait, so that a step in which rows wait has one of `REPLAYED_ROWS` rows: of the client with the most, if
    possible one with rows that wait already."""
    limited = [own for work, own in zip(works, chosen, strict=True) if len(own) < len(work.decodes)]
    if limited:
        num_rows = sum(map(len, chosen))
        size = max((size for size in REPLAYED_ROWS if size <= num_rows), default=num_rows)
        most = max([own for own in limited if own] or chosen, key=len)
        del most[max(1, len(most) - (num_rows - size)) :]


def _in_turns(decodes: list[Sequence]) -> list[Sequence]:
    """Return sequences in the order of their turns: those first that had none, or have waited for longest since their last one."""
    return sorted(decodes, key=lambda one: one.last_turn)

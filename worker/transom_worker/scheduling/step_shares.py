"""`StepShares`: how many tokens of a step each sequence may compute.

Each client that has prompts gets its share of the step's prompt tokens, or with a target time of the time that they take; what it
does not need is the others' (`divide`). Its own prompts share what it gets (`share_limit`). If several clients have work, a step's
time is divided among them before that (`time_shares`): sequences that decode may have to wait, and a client's prompts may be held
to fewer tokens.
"""

import math
from collections.abc import Iterable
from itertools import islice

from transom_worker.scheduling.admission import AdmissionControl
from transom_worker.scheduling.clients import Client
from transom_worker.scheduling.dividing import divide, share_limit
from transom_worker.scheduling.prompt_pace import PromptPace
from transom_worker.scheduling.sequence import Sequence, SequenceStatus
from transom_worker.scheduling.step import StepPlan
from transom_worker.scheduling.time_shares import ClientWork, TimeShares

MAX_SHARING = 32  # waiting prompts that may have a share of one step
PARTS = 1 << 20  # of a step's time


class StepShares:
    """Divides steps: `of_step` before a step is planned, `planned` after it.

    `max_chunk` is the most tokens of one sequence in a step; None: there is no such limit. If `shares_time` is False, no client is
    held to a share of the time.
    """

    def __init__(
        self,
        admission: AdmissionControl,
        pace: PromptPace,
        *,
        max_num_seqs: int,
        max_chunk: int | None,
        shares_time: bool,
    ) -> None:
        self._admission, self._pace = admission, pace
        self._max_num_seqs, self._max_chunk = max_num_seqs, max_chunk
        self._time = TimeShares(pace, is_on=shares_time)

    def of_step(self, num_tokens: int) -> dict[Sequence, int] | None:
        """Return how many tokens sequences may compute in this step of at most `num_tokens`; None for no limit.

        A prompt is a sequence with more than one token to compute; one that is not in the result gets no token. A sequence that
        decodes gets its token unless the result has 0 for it. There is no limit if the only prompt delays no other request;
        without a target time, there is none either if all prompts are of one client and no time is divided.
        """
        if len(self._admission.clients) <= 1 and self._pace.target_s is None and not self._time.has_guest:
            self._time.begin_step([])
            return None
        works = self._gather()
        shares = self._time.begin_step(works)
        num_decoding = sum(len(work.decodes) for work in works) - len(shares)
        with_prompts = [work for work in works if work.prompts]
        prompts = [one for work in with_prompts for one in work.prompts]
        is_timed = bool(shares) or any(work.most_tokens < math.inf for work in with_prompts)
        if not prompts or (len(prompts) == 1 and len(works) == 1 and not (num_decoding or is_timed)):
            return shares or None
        if len(with_prompts) == 1 and self._pace.target_s is None and not is_timed:
            return None
        limits = self._limits(with_prompts, num_tokens, num_decoding)
        for work, of_client in zip(with_prompts, limits, strict=True):
            needs = [one.num_ready for one in work.prompts]
            most = min(of_client, work.most_tokens)
            own = needs if most == math.inf else share_limit(int(most), needs, num_running=work.num_running)
            if work.most_tokens < math.inf:  # what shares exceed the limit by would be others' time
                own = [max(0, min(share, int(most) - sum(own[:at]))) for at, share in enumerate(own)]
            shares |= zip(work.prompts, own, strict=True)
        return shares

    def planned(self, plan: StepPlan, rows: Iterable[Sequence]) -> None:
        """Charge the clients for the step's time; `rows` are the sequences of the plan's rows."""
        self._time.planned(plan, rows)

    def _limits(self, works: list[ClientWork], num_tokens: int, num_decoding: int) -> Iterable[float]:
        """Return how many prompt tokens of a step each client may compute.

        A client alone may compute what takes the target time, after the context of its first prompt. Of several, each may compute a
        part of what it could alone, since a token after a long context takes as much time as several without one.
        """
        contexts = [work.prompts[0].scheduled for work in works]
        paced = [self._pace.limit(context, decodes=num_decoding > 0) or math.inf for context in contexts]
        if len(works) == 1:
            return paced
        wanted = [int(min(sum(map(self._most_tokens, work.prompts)), work.most_tokens)) for work in works]
        weights = [work.client.weight for work in works]
        most = max(1, num_tokens - num_decoding)  # each decoding sequence needs one token of the step
        if self._pace.target_s is not None:
            needs = [math.ceil(PARTS * want / limit) for want, limit in zip(wanted, paced, strict=True)]
            parts = zip(wanted, divide(PARTS, needs, weights), paced, map(self._least, works), strict=True)
            wanted = [min(want, max(least, math.ceil(part * limit / PARTS))) for want, part, limit, least in parts]
        return divide(most, wanted, weights)

    def _least(self, work: ClientWork) -> int:
        """Return the least that a client's part of a step is cut to: what is worth a step if it has saved for that, else two tokens
        since a row of one counts as one that decodes."""
        return 2 if work.most_tokens == math.inf else self._pace.least_tokens(work.prompts[0].scheduled)

    def _gather(self) -> list[ClientWork]:
        """Return what each client could compute in a step, for those that can compute anything."""
        works: dict[Client, ClientWork] = {}
        of = self._admission.clients.of
        for one in self._admission.running:
            ready = one.num_ready
            if ready > 0 and one.status is SequenceStatus.RUNNING:
                client = of(one)
                work = works.get(client) or works.setdefault(client, ClientWork(client))
                if ready == 1:
                    work.decodes.append(one)
                else:
                    work.prompts.append(one)
        for work in works.values():
            work.num_running = len(work.prompts)
        for one in self._next_waiting():
            works.setdefault(of(one), ClientWork(of(one))).prompts.append(one)
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

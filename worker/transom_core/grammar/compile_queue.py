"""`CompileQueue`: the requests that wait for their grammars. Clients take turns, and a text of several requests is compiled once.

Each client has a queue of its own. Next is the client whose grammars have taken the least CPU time so far, divided by the client's
weight (`client_queue`). The *outcome* of a text is its compiled grammar, or an error. A request leaves its client's queue
when it is the first one there and the outcome of its text is known, so that each client gets its grammars in the order in which it
sent them.

Example: A sends the texts s, t and s, and then B sends u. The order is s, u, t, and A's third request needs no compiling.

    queue.add(job)                                        a request comes
    if known := queue.next_known(): ...                   the compiler's thread, in a loop: first the requests with known outcomes,
    elif job := queue.next_job():                         then the next text
        queue.compiled(job, outcome)
    queue.charge(job, seconds)
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from transom_core.client_queue import ClientQueue
from transom_core.errors import Overloaded

MAX_CHARS = 64 << 20  # of all texts that wait

Owner = TypeVar("Owner")
Outcome = TypeVar("Outcome")


@dataclass(slots=True, eq=False, kw_only=True)
class CompileJob(Generic[Owner]):
    """A request (`owner`) that waits for the grammar `text`."""

    owner: Owner
    text: str
    client: str = ""
    weight: float = 1.0
    num_bytes: int = 0  # of the compiled grammar, as a router measured it; 0: unknown
    resumed_output_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class _Text(Generic[Outcome]):
    """A text that `num_jobs` requests wait for, the first of which is `client`'s; `outcome` is None until it is known."""

    client: str
    num_jobs: int = 0
    outcome: Outcome | None = None


class CompileQueue(Generic[Owner, Outcome]):
    """The queues of all clients. Not thread-safe. `recall` returns the cached outcome of a text, or None."""

    def __init__(self, recall: Callable[[str], Outcome | None], *, max_chars: int = MAX_CHARS) -> None:
        self._recall, self._max_chars = recall, max_chars
        self._waiting: ClientQueue[CompileJob[Owner]] = ClientQueue()
        self._texts: dict[str, _Text[Outcome]] = {}
        self._jobs_of: dict[Owner, list[CompileJob[Owner]]] = {}
        # client -> characters of the texts that it was the first one to wait for
        self._num_chars: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._jobs_of)

    def __len__(self) -> int:
        return sum(map(len, self._jobs_of.values()))

    def check_room(self, client: str, text: str) -> None:
        """Check that one more text may wait.

        One client may fill the queue. A full queue accepts only the texts of clients that stay within their share, which is
        `max_chars` divided by the number of clients.

        Raises:
            Overloaded: the queue is full, and the client would have more than its share.
        """
        num_chars = self._num_chars.total()
        if num_chars + len(text) <= self._max_chars or text in self._texts:
            return
        num_clients = len(self._num_chars.keys() | {client})
        if self._num_chars[client] + len(text) > self._max_chars / num_clients:
            raise Overloaded(
                f"{num_chars:,} characters of grammars wait to be compiled, and the limit is {self._max_chars:,}; "
                "try again later, or send smaller schemas."
            )

    def add(self, job: CompileJob[Owner]) -> None:
        """Add a request to its client's queue."""
        text = self._texts.get(job.text)
        if text is None:
            text = self._texts[job.text] = _Text(job.client)
            self._num_chars[job.client] += len(job.text)
        text.num_jobs += 1
        self._waiting.add(job.client, job)
        self._jobs_of.setdefault(job.owner, []).append(job)

    def cancel(self, owner: Owner) -> None:
        """Forget a request that has ended, if it waits. A text that no other request waits for will not be compiled."""
        for job in list(self._jobs_of.get(owner, ())):
            self._remove(job)

    def next_known(self) -> tuple[CompileJob[Owner], Outcome] | None:
        """Remove and return a request that is the first one of its client and whose outcome is known; None if there is none."""
        for job in self._waiting.in_turn():
            outcome = self._texts[job.text].outcome
            outcome = self._recall(job.text) if outcome is None else outcome
            if outcome is not None:
                self._remove(job)
                return job, outcome
        return None

    def next_job(self, may_compile: Callable[[CompileJob[Owner]], bool] = lambda _: True) -> CompileJob[Owner] | None:
        """Return the request whose text is compiled next; it stays in the queue until its outcome is known.

        A client takes part only if `may_compile` is true for its first request. Return None if there is no such client.
        """
        job = next(filter(may_compile, self._waiting.in_turn()), None)
        if job is not None:
            self._waiting.begin_turn(job.client)
        return job

    def compiled(self, job: CompileJob[Owner], outcome: Outcome) -> None:
        """Note the outcome of a request's text; the request may have ended meanwhile."""
        if (text := self._texts.get(job.text)) is not None:
            text.outcome = outcome

    def charge(self, job: CompileJob[Owner], seconds: float) -> None:
        """Charge a request's client for the time that its grammar took."""
        self._waiting.charge(job.client, seconds / job.weight)

    def clear(self) -> None:
        """Forget all requests."""
        for owner in list(self._jobs_of):
            self.cancel(owner)

    def _remove(self, job: CompileJob[Owner]) -> None:
        """Remove a request, and forget its text if no other request needs it."""
        self._waiting.remove(job.client, job)
        jobs = self._jobs_of[job.owner]
        jobs.remove(job)
        if not jobs:
            del self._jobs_of[job.owner]
        text = self._texts[job.text]
        text.num_jobs -= 1
        if not text.num_jobs:
            del self._texts[job.text]
            self._num_chars[text.client] -= len(job.text)
            if not self._num_chars[text.client]:
                del self._num_chars[text.client]

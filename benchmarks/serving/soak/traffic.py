"""Clients that ask until they are told to stop, and judge every answer.

A well-behaved client asks again where its connection broke because a router was killed (the one end without an answer that is
allowed) and where it was told to come later; every other end without the calm run's answer breaks a promise.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from benchmarks.serving.soak import journal as promises
from benchmarks.serving.soak.accounts import Tally
from benchmarks.serving.soak.answers import Answer, Hung, ask, difference, http_client, is_beginning
from benchmarks.serving.soak.bad_clients import HOSTILE_ADDRESS, Attack, Rude, attacks, bad_requests
from benchmarks.serving.soak.cases import COMPLETIONS, FILLING, Case, Conversation
from benchmarks.serving.soak.journal import Journal, Windows

PROMISED_503 = ("worker_unavailable", "overloaded")
RETRY_S = 0.5
NUM_FILLING_ATTACKS = 80  # of each kind
BEHAVIOURS: dict[str, int] = {  # weights
    "single": 40, "conversation": 30, "leave": 10, "slow": 5, "bad": 8, "rude": 7,
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Known:
    """What is asked, and the calm runs' answers by `Answer.model` and the case's name.

    A conversation goes on with `replies`, those of the first calm run, whichever model answers: so each request is known.
    """

    cases: Sequence[Case]
    conversations: Sequence[Conversation]
    answers: dict[tuple[str, str], Answer] = field(default_factory=dict)
    replies: dict[str, list[str]] = field(default_factory=dict)

    def of_model(self, answer: Answer, case: Case) -> Answer | None:
        """What the model that an answer names has answered in the calm run; None if no model of the soak has that name."""
        return self.answers.get((answer.model, case.name))

    @property
    def ordinary(self) -> list[Case]:
        """What clients ask at random."""
        return [case for case in self.cases if not case.name.startswith(FILLING)]


class Traffic:
    """All clients of a soak. `disturbed` and `router_killed` are the times at which what errors are allowed."""

    def __init__(self, url: str, known: Known, journal: Journal) -> None:
        self.tally = Tally()
        self.disturbed, self.router_killed = Windows(), Windows()
        self._url, self._known, self._journal = url, known, journal
        self._quick, self._narrow = http_client(url), http_client(url, slow=True)

    async def close(self) -> None:
        """Close the clients' connections."""
        await self._quick.aclose()
        await self._narrow.aclose()

    async def run(
        self, num_clients: int, pause_s: float, seed: str, is_over: Callable[[], bool], *, only: Sequence[str] = ()
    ) -> None:
        """Run `num_clients` clients until `is_over()`, each with random choices of its own; `only` names behaviours, if not all."""
        weights = {name: weight for name, weight in BEHAVIOURS.items() if not only or name in only}

        async def client(source: random.Random) -> None:
            while not is_over():
                [behaviour] = source.choices(list(weights), list(weights.values()))
                await self.once(behaviour, source, pause_s)
                await asyncio.sleep(source.expovariate(1 / pause_s) if pause_s else 0)

        await asyncio.gather(*(client(random.Random(f"{seed}/{i}")) for i in range(num_clients)))

    async def once(self, behaviour: str, source: random.Random, pause_s: float = 0.0) -> None:
        """Behave once; a fault of the soak's own code counts as a broken promise, and does not end the soak."""
        act: Callable[[random.Random, float], Coroutine[Any, Any, None]] = getattr(self, f"_{behaviour}")
        self._journal.count(f"behaviour {behaviour}")
        try:
            await act(source, pause_s)
        except Exception as fault:
            self._journal.broke(promises.ENDS, f"the soak's client failed ({behaviour}): {fault!r}")

    async def fill(self, num_requests: int) -> None:
        """Send small requests, 16 at a time, of several prompts (for all workers), which fill every store of the last requests.

        The hostile client meanwhile fills its share of the workers' caches with grammars (64 MiB) and texts, has the vocabulary of
        grammars read (50 MiB), and fills the disk.
        """
        cases = [case for case in self._known.cases if case.name.startswith(FILLING)]
        source = random.Random("fill")
        numbers = iter(range(num_requests))

        async def send() -> None:
            for number in numbers:
                await self._ask_well(cases[number % len(cases)], stream=False)

        async with http_client(self._url, address=HOSTILE_ADDRESS) as client, asyncio.TaskGroup() as senders:
            for _ in range(16):
                senders.create_task(send())
            for _ in range(NUM_FILLING_ATTACKS):
                for attack in attacks(source):
                    if attack.name in ("grammars", "tokenize", "salts"):
                        await self._attack(client, replace(attack, leave_after_s=60.0))

    async def calm_answers(self) -> None:
        """Ask everything once, and keep the answers."""
        for case in self._known.cases:
            await self._keep(case)
        for conversation in self._known.conversations:
            given: list[str] = []
            replies = self._known.replies.setdefault(conversation.name, given)
            for turn in range(len(conversation.turns)):
                given.append((await self._keep(conversation.case(replies[:turn]))).choices[0].text)

    async def _keep(self, case: Case) -> Answer:
        answer = await ask(self._quick, case, stream=False)
        if not answer.is_good:
            raise RuntimeError(f"{case.name}: {answer.kind} {answer.error} in the calm run")
        self.tally.add(case.path, answer)
        self._known.answers[answer.model, case.name] = answer
        return answer

    # behaviours

    async def _single(self, source: random.Random, _pause_s: float) -> None:
        await self._ask_well(source.choice(self._known.ordinary), stream=source.random() < 0.7)

    async def _slow(self, source: random.Random, _pause_s: float) -> None:
        wide = [case for case in self._known.cases if case.name.startswith("wide")]
        await self._ask_well(source.choice(wide), stream=True, pause_s=source.uniform(0.02, 0.15), client=self._narrow)

    async def _conversation(self, source: random.Random, pause_s: float) -> None:
        conversation = source.choice(self._known.conversations)
        replies = self._known.replies[conversation.name]
        for turn in range(source.randint(1, len(conversation.turns))):
            if await self._ask_well(conversation.case(replies[:turn]), stream=source.random() < 0.7) is None:
                return
            await asyncio.sleep(source.expovariate(1 / pause_s) if pause_s else 0)

    async def _leave(self, source: random.Random, _pause_s: float) -> None:
        case = source.choice(self._known.ordinary)
        begin_s = time.monotonic()
        self.tally.left(case.path)
        try:
            async with asyncio.timeout(source.uniform(0.01, 4.0)):
                answer = await ask(self._quick, case, stream=True, leave_after=source.randint(0, 25))
        except TimeoutError:
            return
        except httpx.TransportError as error:
            self._judge_break(case, begin_s, error)
            return
        if answer.status == 200 and answer.error is None and answer.choices:
            expected = self._known.of_model(answer, case)
            if expected is None or not is_beginning(answer, expected):
                self._journal.broke(promises.TEXTS, f"{case.name}: the beginning {answer} is another")

    async def _bad(self, source: random.Random, _pause_s: float) -> None:
        bad = source.choice(list(bad_requests(source)))
        begin_s = time.monotonic()
        answer = Answer()
        try:
            reply = await self._quick.request(
                bad.method, bad.path, content=bad.content, headers={"content-type": "application/json"}
            )
        except httpx.TransportError as error:
            if not self.router_killed.overlaps(begin_s) and not (bad.status == 413 and _may_break(error)):
                self._journal.broke(promises.BAD_BODIES, f"{bad.name}: {error!r}")
            self.tally.left(bad.path)
            return
        answer.status = reply.status_code
        answer.read_body(reply.content)
        self._journal.count(f"bad request {bad.name}: {answer.status}")
        if answer.status == bad.status and answer.error is not None:
            self.tally.add(bad.path, answer)
        elif self.router_killed.overlaps(begin_s):
            self.tally.left(bad.path)
        else:
            self._journal.broke(promises.BAD_BODIES, f"{bad.name}: {reply.status_code} {reply.text[:300]}")

    async def _rude(self, source: random.Random, _pause_s: float) -> None:
        rude = Rude(self._url, source)
        way = source.choice(rude.WAYS)
        self._journal.count(f"rude {way}")
        try:
            path = await rude.behave(way)
        except ConnectionError:
            path = COMPLETIONS
        if path:
            self.tally.left(path)

    async def hostile(self, seed: str, pause_s: float, is_over: Callable[[], bool]) -> None:
        """One client at an address of its own takes what it can until `is_over()`, in one way after the other."""
        source = random.Random(f"{seed}/hostile")
        async with http_client(self._url, address=HOSTILE_ADDRESS) as client:
            while not is_over():
                attack = source.choice(attacks(source))
                await asyncio.gather(*(self._attack(client, attack) for _ in range(attack.at_once)))
                await asyncio.sleep(source.expovariate(1 / pause_s))

    async def _attack(self, client: httpx.AsyncClient, attack: Attack) -> None:
        self.tally.left(attack.path)
        method = "GET" if attack.body is None else "POST"
        begin_s, seen = time.monotonic(), "left"
        try:
            async with asyncio.timeout(attack.leave_after_s):
                seen = str((await client.request(method, attack.path, json=attack.body)).status_code)
        except TimeoutError:
            pass
        except httpx.TransportError as error:
            seen = repr(error)
        self._journal.count(f"hostile {attack.name}: {seen}")
        if seen not in ("left", "200", "503") and not self.router_killed.overlaps(begin_s):
            self._journal.broke(promises.KINDS, f"hostile {attack.name}: {seen}")

    # judging

    async def _ask_well(
        self, case: Case, *, stream: bool, pause_s: float = 0.0, client: httpx.AsyncClient | None = None
    ) -> Answer | None:
        """Ask until there is a whole answer, which must be the calm run's; None where a promise broke."""
        self._journal.count("well-behaved requests")
        while True:
            begin_s = time.monotonic()
            try:
                answer = await ask(client or self._quick, case, stream=stream, pause_s=pause_s)
            except Hung as hung:
                self.tally.left(case.path)
                self._journal.broke(promises.ENDS, str(hung), case=case.name, stream=stream)
                return None
            except httpx.TransportError as error:
                self.tally.left(case.path)
                if not self._judge_break(case, begin_s, error):
                    return None
                await asyncio.sleep(RETRY_S)
                continue
            if self.disturbed.overlaps(begin_s):
                self._journal.longest_gaps_s.append(answer.longest_gap_s)
            if answer.is_good:
                return self._judge_answer(case, answer)
            if not self._judge_error(case, answer, begin_s, stream=stream):
                return None
            await asyncio.sleep(RETRY_S)

    def _judge_answer(self, case: Case, answer: Answer) -> Answer | None:
        self.tally.add(case.path, answer)
        self._journal.count("answers with tokens")
        self._journal.count(f"answers of {answer.model}")
        expected = self._known.of_model(answer, case)
        wrong = f"an answer of {answer.model}" if expected is None else difference(answer, expected)
        if wrong is None:
            return answer
        self._journal.broke(promises.TEXTS, f"{case.name}: {wrong}")
        return None

    def _judge_break(self, case: Case, begin_s: float, error: Exception) -> bool:
        """Whether a connection may have broken: only because its router was killed."""
        if self.router_killed.overlaps(begin_s):
            self._journal.count("connections that broke with a killed router")
            self._journal.note("cut", case=case.name, error=repr(error))
            return True
        self._journal.broke(promises.ENDS, f"{case.name}: the connection broke: {error!r}")
        return False

    def _judge_error(self, case: Case, answer: Answer, begin_s: float, *, stream: bool) -> bool:
        """Whether this error may come, and the client asks again."""
        seen = f"{case.name}: {answer.kind} {answer.error or answer.unreadable}"
        code = (answer.error or {}).get("code")
        self._journal.note("error", case=case.name, kind=answer.kind, seen=seen)
        if self.router_killed.overlaps(begin_s) and answer.error is None:  # of Serve's proxy, or a stream that was cut
            self.tally.left(case.path)
            self._journal.count(f"ends with a killed router: {answer.kind}")
            return True
        self.tally.add(case.path, answer)
        is_promised = code in PROMISED_503 and (answer.status == 200 or answer.retry_after is not None)
        if is_promised and self.disturbed.overlaps(begin_s):
            self._journal.count(f"errors while disturbed: {answer.kind}")
            return True
        self._journal.broke(promises.ENDS if answer.error is None else promises.KINDS, seen, stream=stream)
        return False


def _may_break(error: httpx.TransportError) -> bool:
    """A server may answer and close before a body that is too large was sent; the client then may not see the answer."""
    return isinstance(error, httpx.WriteError | httpx.ReadError | httpx.RemoteProtocolError)

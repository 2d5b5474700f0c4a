"""Long work runs on few threads, by turns of clients; the event loop does none of it."""

import asyncio
import threading
from collections import Counter
from functools import partial
from typing import Any

import pytest

from transom_cluster.http.client_threads import (
    MAX_SHORT_CHARS,
    NUM_CHECK_THREADS,
    THREAD_NAME,
    ClientThreads,
    FairThreads,
    RequestThreads,
)
from transom_cluster.openai.request.body import BodyParser
from transom_cluster.openai.request.body_shape import SMALL_BODY_BYTES
from transom_cluster.openai.request.message_fields import MAX_MESSAGES
from transom_core.client_queue import Sharer


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


class Held:
    """Work that begins at once and ends when the test says so."""

    def __init__(self, order: list[str], name: str) -> None:
        self.may_end = threading.Event()
        self._order, self._name = order, name

    def __call__(self) -> str:
        self._order.append(self._name)
        self.may_end.wait()
        return self._name


async def test_clients_take_turns_by_the_time_of_their_work_and_a_client_keeps_its_order():
    now_s, order, first = 0.0, [], Held([], "first")
    threads = FairThreads(1, clock=lambda: now_s)

    async def work(name: str, seconds: float, weight: float = 1.0) -> None:
        def function() -> None:
            nonlocal now_s
            order.append(name)
            now_s += seconds

        await threads.run(Sharer(name[0], weight), function)

    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(threads.run(Sharer("z"), first))]
    await settle()
    tasks += [asyncio.create_task(work(f"a{i}", 10.0)) for i in range(3)]  # texts of 2 MB
    tasks += [asyncio.create_task(work(f"b{i}", 1.0)) for i in range(15)]  # small chats
    tasks += [asyncio.create_task(work(f"c{i}", 4.0, weight=4.0)) for i in range(4)]
    await settle()
    first.may_end.set()
    await asyncio.gather(*tasks)
    for client in "abc":
        numbers = [int(name[1:]) for name in order if name[0] == client]
        assert numbers == sorted(numbers)
    clients = "".join(name[0] for name in order)
    # A's first text costs as much as ten chats of B, and as ten turns of C, whose weight makes 4 seconds count as one.
    assert (clients[0], Counter(clients[: clients.index("a", 1)])) == ("a", {"a": 1, "b": 10, "c": 4})


async def test_an_error_is_raised_and_frees_the_thread():
    threads = FairThreads(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await threads.run(Sharer("a"), lambda: 1 // 0)


async def never() -> Any:
    await asyncio.Event().wait()


async def test_short_work_does_not_wait_for_long_work():
    threads, order = ClientThreads(RequestThreads(), Sharer("a"), never), []
    long = [Held(order, f"long {i}") for i in range(5)]
    tasks = [asyncio.create_task(threads.run(work, num_chars=MAX_SHORT_CHARS + 1)) for work in long]
    await settle()
    assert await threads.run(lambda: "short", num_chars=MAX_SHORT_CHARS) == "short"
    assert await threads.run(threading.current_thread, num_chars=5, inline_chars=5) is threading.current_thread()
    for work in long:
        work.may_end.set()
    await asyncio.gather(*tasks)


async def test_checks_of_a_client_that_has_become_patient_leave_the_threads_of_others():
    """They had come before the client was known to take long; pool and child always match."""
    pools, patient = RequestThreads(), set()
    hostile, usual = (ClientThreads(pools, Sharer(name), never) for name in ("hostile", "usual"))
    checked: list[tuple[int, bool]] = []
    may_end, may_end_patient = threading.Event(), threading.Event()

    def check(name: str, *, is_patient: bool) -> str:
        checked.append((threading.get_ident(), is_patient))
        (may_end_patient if is_patient else may_end).wait(20.0)
        patient.add(name)  # its seconds are known now
        return name

    def start(threads: ClientThreads) -> asyncio.Task[str]:
        name = threads.sharer.client
        return asyncio.create_task(threads.check(partial(check, name), is_patient=lambda: name in patient))

    tasks = [start(hostile) for _ in range(6)]
    await settle()
    may_end.set()
    await asyncio.wait_for(asyncio.gather(*tasks[:2]), 20)
    try:
        assert await asyncio.wait_for(start(usual), 20) == "usual"
        assert [is_patient for _, is_patient in checked].count(False) == NUM_CHECK_THREADS + 1
    finally:
        may_end_patient.set()
    assert await asyncio.gather(*tasks) == ["hostile"] * 6
    threads_of = {kind: {thread for thread, is_patient in checked if is_patient == kind} for kind in (False, True)}
    assert len(checked) == 7
    assert len(threads_of[True]) == 1
    assert not threads_of[True] & threads_of[False]


@pytest.fixture
def places(api, monkeypatch) -> dict[str, str]:
    """The thread in which the API last parsed a body, and rendered a chat."""
    found: dict[str, str] = {}
    parse, render = BodyParser.parse, api.router.tokenizer.apply_chat_template

    def noted_parse(self, body):
        found["parse"] = threading.current_thread().name
        return parse(self, body)

    def noted_render(messages, **values):
        found["render"] = threading.current_thread().name
        return render(messages, **values)

    monkeypatch.setattr(BodyParser, "parse", noted_parse)
    monkeypatch.setattr(api.router.tokenizer, "apply_chat_template", noted_render)
    return found


EMPTY = {"role": "user", "content": ""}


@pytest.mark.parametrize(
    ("fields", "is_long"),
    [
        ({"messages": [EMPTY]}, False),
        ({"messages": [EMPTY] * MAX_MESSAGES}, True),
        ({"messages": [EMPTY], "metadata": {"a": "x" * SMALL_BODY_BYTES}}, True),
    ],
    ids=["short", "empty messages", "metadata"],
)
async def test_long_bodies_are_parsed_and_all_chats_rendered_off_the_event_loop(api, places, fields, is_long):
    for path in ("/v1/chat/completions", "/tokenize") if "metadata" not in fields else ("/v1/chat/completions",):
        places.clear()
        response = await api.client.post(path, json=fields)
        assert response.status_code in (200, 400)  # the longest do not fit the model
        assert places["parse"].startswith(THREAD_NAME) == (is_long or path == "/tokenize")  # which does all in one call
        assert places["render"].startswith(THREAD_NAME)


@pytest.mark.parametrize("left", ["a", "c"])
async def test_work_of_a_client_that_has_left_never_runs(api, monkeypatch, left):
    """Two texts are being tokenised; of two more that wait, the one whose client leaves is not tokenised any more. Work that has
    begun keeps its thread until it ends."""
    may_end, begun = threading.Event(), []

    def encode(text, **options):
        begun.append(text[0])
        may_end.wait()
        return [1]

    monkeypatch.setattr(api.router.tokenizer, "encode", encode)
    calls = [api.call("/tokenize", {"prompt": name * 3000}) for name in "abcd"]
    await settle()
    try:
        await calls["abcd".index(left)].leave()
        await settle()
        assert sorted(begun) == ["a", "b"]
    finally:
        may_end.set()
    for call in calls:
        await call.ended()
    assert [call.status for call in calls] == [None if name == left else 200 for name in "abcd"]
    assert sorted(begun) == [name for name in "abcd" if name != left or left == "a"]

"""The soak's own judgement: what it takes for a broken promise, and what not. tests/end_to_end/test_soak.py runs it."""

import json
import random
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.soak import journal as promises
from benchmarks.serving.soak.accounts import Tally, check_page, compare, in_use
from benchmarks.serving.soak.answers import Answer, Choice, difference, is_beginning
from benchmarks.serving.soak.cases import Case
from benchmarks.serving.soak.cluster import Page
from benchmarks.serving.soak.disk_blocks import contents_of
from benchmarks.serving.soak.journal import Journal
from benchmarks.serving.soak.process_watch import Sample, leftovers, slope_per_h
from benchmarks.serving.soak.traffic import Known, Traffic
from tests.benchmarks.stub_server import stub_server
from transom_worker.kvcache.tiers.disk.folder import BlockFolder

PAGE = """
transom_router_requests_total{router="r",endpoint="/v1/completions",status="200"} 3
transom_router_prompt_tokens_total{router="r"} 30
transom_router_output_tokens_total{router="r"} 12
transom_requests_total{worker="w",finish_reason="length"} 3
transom_request_prompt_tokens_count{worker="w"} 3
transom_prompt_tokens_total{worker="w"} 30
transom_prefix_tokens_total{worker="w",outcome="missed",reason="never_seen"} 20
transom_prefix_tokens_total{worker="w",outcome="hit",reason=""} 10
transom_kv_pool_bytes{worker="w"} 1000
transom_kv_pages{worker="w",state="free"} 6
transom_kv_pages{worker="w",state="leased"} 4
transom_kv_bytes{worker="w",group="full",state="cached"} 380
transom_kv_blocks{worker="w",group="full",state="active"} 0
transom_kv_waste_ratio{worker="w"} 0.1
"""
EMPTY = Page.read("")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "events.jsonl")


def broken(journal: Journal) -> list[str]:
    return [promise for promise, _ in journal.broken]


def answer(text: str, **changes) -> Answer:
    usage = {"prompt_tokens": 10, "completion_tokens": 4}
    return Answer(status=200, choices={0: Choice(text, "length")}, usage=usage, is_whole=True, **changes)


def test_an_answer_that_differs_anywhere_is_another() -> None:
    want = answer("four tokens")
    assert difference(answer("four tokens"), want) is None
    assert "four tokenz" in str(difference(answer("four tokenz"), want))
    shorter = answer("four tokens")
    shorter.usage = {"prompt_tokens": 10, "completion_tokens": 3}
    assert difference(shorter, want) == "completion_tokens 3, not 4"
    assert is_beginning(answer("four"), want)
    assert not is_beginning(answer("our"), want)


@pytest.mark.parametrize(
    ("right", "wrong", "promise"),
    [
        ('output_tokens_total{router="r"} 12', 'output_tokens_total{router="r"} 13', promises.SUMS),
        ('reason=""} 10', 'reason=""} 9', promises.SUMS),
        ('state="cached"} 380', 'state="cached"} 420', promises.BLOCKS),
    ],
    ids=["a token too many", "a token without an outcome", "more blocks than pages"],
)
def test_sums_that_do_not_add_up_break_promises(journal: Journal, right: str, wrong: str, promise: str) -> None:
    tally = Tally()
    for _ in range(3):
        tally.add("/v1/completions", answer("text"))
    for page, expected in ((PAGE, []), (PAGE.replace(right, wrong), [promise])):
        compare(EMPTY, Page.read(page), tally, journal, exact=True)
        check_page(Page.read(page), journal)
        assert broken(journal) == expected
    journal.broken.clear()
    tally.left("/v1/completions")  # whose client may have been sent more tokens
    compare(EMPTY, Page.read(PAGE.replace(" 12", " 13")), tally, journal, exact=False)
    assert not journal.broken


def test_active_blocks_are_in_use() -> None:
    assert not list(in_use(Page.read(PAGE)))
    assert list(in_use(Page.read(PAGE.replace('state="active"} 0', 'state="active"} 2')))) == ["2 active blocks"]


def test_blocks_in_the_folder_of_another_model_break_a_promise(tmp_path: Path, journal: Journal) -> None:
    first, second = (BlockFolder(tmp_path, bytes([number] * 32), space_bytes=10**6) for number in (1, 2))
    for number in range(2):
        first.write(0, bytes([number] * 32), b"1234")
    right, wrong = sorted(tmp_path.rglob("*.kv"))
    assert contents_of(right, journal) == b"1234"
    moved = wrong.parents[2] / second.fingerprint.hex()[:32] / "01" / wrong.name
    moved.parent.mkdir()
    wrong.rename(moved)
    assert not journal.broken
    contents_of(moved, journal)
    assert broken(journal) == [promises.FILES]


def sample(pid: int, minute: float, mib: float, **changes: int) -> Sample:
    numbers = {"num_fds": 10, "num_threads": 5} | changes
    return Sample("worker", pid, 0.0, 60 * minute, mib, **numbers)


def test_a_slope_is_of_processes_and_not_of_their_restarts() -> None:
    rows = [[sample(1, m, 300 + m) for m in range(10)], [sample(2, m, 200 + m) for m in range(20, 30)]]
    assert slope_per_h(rows) == pytest.approx(60.0)
    assert slope_per_h([]) == 0.0


def test_leftovers_are_descriptors_threads_and_processes() -> None:
    before = [sample(1, 0, 1)]
    assert leftovers(before, [sample(2, 9, 1, num_fds=15)], 5) == []
    assert leftovers(before, [sample(2, 9, 1, num_fds=16), sample(3, 9, 1, num_threads=11)], 5) == [
        "worker: 2 processes, 1 before",
        "worker: 16 descriptors, 10 before",
        "worker: 11 threads, 5 before",
    ]


CASE = Case("one", "/v1/completions", {"prompt": "a", "max_tokens": 2})


def stub_answer(text: str) -> dict[str, Any]:
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    return {"choices": [{"index": 0, "text": text, "finish_reason": "length"}], "usage": usage}


def stub_error(code: str) -> tuple[int, list[str]]:
    return 500, [json.dumps({"error": {"message": "m", "type": "server_error", "param": None, "code": code}})]


async def ask_stub(journal: Journal, *replies: tuple[int, list[str]], killed: bool = False) -> Counter[str]:
    """Ask the one case of a server that gives these replies in turn; what was counted. `killed`: while a router is being killed."""
    left = iter(replies)
    known = Known(cases=[CASE], conversations=[])
    known.answers["", "one"] = Answer(status=200)
    known.answers["", "one"].read_body(json.dumps(stub_answer("right")).encode())
    with stub_server(lambda _: next(left)) as server:
        traffic = Traffic(server.url, known, journal)
        with ExitStack() as windows:
            if killed:
                windows.enter_context(traffic.disturbed.open())
                windows.enter_context(traffic.router_killed.open())
            await traffic.once("single", random.Random(1))
        await traffic.close()
    assert not list(left)
    return journal.counts


RIGHT, WRONG = (
    (200, [f"data: {json.dumps(stub_answer(text))}\n\n", "data: [DONE]\n\n"]) for text in ("right", "wrong")
)
FOREIGN = (200, [RIGHT[1][0].replace('"usage"', '"system_fingerprint": "other", "usage"'), RIGHT[1][1]])
CUT = (200, [f"data: {json.dumps(stub_answer('ri'))}\n\n"])


async def test_the_calm_answer_breaks_nothing(journal: Journal) -> None:
    assert (await ask_stub(journal, RIGHT))["answers with tokens"] == 1
    assert not journal.broken


@pytest.mark.parametrize(
    ("reply", "promise"),
    [
        (WRONG, promises.TEXTS),
        (FOREIGN, promises.TEXTS),
        (CUT, promises.ENDS),
        ((500, ["Internal Server Error"]), promises.ENDS),
        (stub_error("poison_request"), promises.KINDS),
        (stub_error("internal_error"), promises.KINDS),
    ],
    ids=["wrong text", "another model", "cut stream", "foreign error", "poison", "internal"],
)
async def test_what_breaks_a_promise(journal: Journal, reply: tuple[int, list[str]], promise: str) -> None:
    await ask_stub(journal, reply)
    assert broken(journal) == [promise]


async def test_a_killed_router_excuses_a_cut_stream_and_the_client_asks_again(journal: Journal) -> None:
    counts = await ask_stub(journal, CUT, (500, ["Internal Server Error"]), RIGHT, killed=True)
    assert counts["ends with a killed router: 200 broken off"] == 1
    assert counts["ends with a killed router: 500 unreadable"] == 1
    assert counts["answers with tokens"] == 1
    assert not journal.broken

"""A disk tier under whole engines: prefixes outlive the process, and any fault of a file costs a recompute at most."""

import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine_driver import OnThread, drain, make_engine, make_request, run
from tests.prefix_chains import chain_of
from tests.present import present
from tests.thread_ranks import ThreadRanks
from tests.worker.conftest import Start
from tests.worker.engine.test_engine_restart import Fragile
from transom_core.contract import KvPolicy, WindowPolicy
from transom_core.errors import ConfigError, EngineDead, Overloaded
from transom_core.kv_cache.tiers import DISK
from transom_worker.engine.disk_tier import EngineDiskTier
from transom_worker.engine.engine import Engine
from transom_worker.execution.executor import DiskUsage
from transom_worker.kvcache.tiers.disk.folder import BlockFolder
from transom_worker.kvcache.tiers.disk.listing import ListedChanges
from transom_worker.scheduling.step import StepResult

pytestmark = pytest.mark.usefixtures("fast_reads")

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "block_size": 8, "kv_cache_memory_bytes": 600 << 10, "swap_space": "400KiB",
    "max_model_len": 512, "max_num_seqs": 4, "disk_space": "64MiB",
}  # fmt: skip
WINDOWS: dict[str, Any] = {"window": 40, "window_pattern": "SF"}
Answers = list[tuple[list[int], int]]  # tokens, and how many of the prompt's were cached
Written = tuple[Path, Answers]


def prompts(count: int) -> list[list[int]]:
    return [[5 + number, *(11 + (index * (number + 3)) % 900 for index in range(255))] for number in range(count)]


@pytest.fixture
def open_engine(start: Start, tmp_path: Path) -> Start:
    """Starts engines whose disk tier is in `tmp_path`."""
    return lambda **settings: start(device="cpu", disk_cache=str(tmp_path), **(SETTINGS | settings))


def disk_of(engine: Engine) -> EngineDiskTier:
    return present(engine._disk)


def answers(engine: Engine, tokens: Sequence[list[int]]) -> Answers:
    """Each prompt's answer and how many of its tokens were cached, one request after the other."""
    found = []
    for number, prompt in enumerate(tokens):
        (whole,) = run(engine, [make_request(f"{number}", prompt, max_tokens=6)])
        found.append((whole.token_ids, whole.num_cached_tokens))
    return found


def assert_cached(found: Answers, expected: Answers, *, least: int = 200) -> None:
    """The same answers, for each of which at least so many tokens were cached."""
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert min(cached for _, cached in found) >= least


@pytest.fixture(scope="module")
def written_once(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("written")
    engine = make_engine(str(tiny_model), device="cpu", disk_cache=str(folder), **SETTINGS)
    found = answers(engine, prompts(8))
    engine.shutdown()
    return folder, found


@pytest.fixture
def written(written_once: Written, tmp_path: Path) -> Answers:
    """The answers of an engine whose blocks are in `tmp_path`, which a test may change."""
    shutil.copytree(written_once[0], tmp_path, dirs_exist_ok=True)
    return written_once[1]


def usage(engine: Engine) -> DiskUsage:
    (report,) = engine.executor.rank_reports()
    return present(report.usage.disk)


RANKS: dict[str, Any] = {"executor": partial(ThreadRanks, size=2), "kv_cache_memory_bytes": 300 << 10}


@pytest.mark.parametrize("settings", [{}, WINDOWS, RANKS], ids=["full, in pieces", "windows", "two ranks"])
def test_a_second_engine_hits_what_the_first_one_wrote(
    open_engine: Start, tmp_path: Path, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    if not settings:
        request.getfixturevalue("one_block_in_flight")
    first = open_engine(**settings)
    expected = answers(first, prompts(8))
    first.shutdown()
    assert [cached for _, cached in expected] == [0] * 8
    num_ranks = 1 + ("executor" in settings)
    assert len(list((tmp_path / "transom-kv").iterdir())) == num_ranks + 1  # a folder each, and the count of bytes
    second = open_engine(**settings)
    assert_cached(answers(second, prompts(8)), expected)  # what was in the first engine's memory at its end, too
    if num_ranks == 1:  # several report their usage once a second
        assert usage(second).num_read > 0
        assert usage(second).num_broken == 0


def test_a_space_under_one_block_is_refused(open_engine: Start) -> None:
    with pytest.raises(ConfigError, match=r"--disk-space is 6000 bytes; .* up to 8308"):
        open_engine(disk_space=6000)
    open_engine(disk_space=8308).shutdown()


def test_a_client_whose_loads_wait_delays_another_by_no_more_than_computing_takes(
    open_engine: Start, written: Answers
) -> None:
    engine = open_engine()
    engine.add(replace(make_request("hostile", prompts(1)[0], max_tokens=6), client="hostile"))
    (loading,) = disk_of(engine)._loading.values()
    for estimate_s, names in ((0.0, ["hostile", "victim-0"]), (1e6, ["hostile", "victim-0", "own"])):
        loading.estimate_s = estimate_s  # of reading: nothing, or more than computing the prefix takes
        if estimate_s:
            engine.add(replace(make_request("own", prompts(1)[0], max_tokens=6), client="hostile"))
        request = make_request(f"victim-{int(estimate_s > 0)}", prompts(1)[0], max_tokens=6)
        engine.add(replace(request, client="victim"))
        assert [one.request.request_id for one in engine.scheduler.admission.waiting.held] == names
    drain(engine)


def test_a_restart_of_the_ranks_ends_imports(open_engine: Start, written: Answers) -> None:
    engine = open_engine(executor=Fragile)
    executor = engine.executor
    assert isinstance(executor, Fragile)
    engine.add(make_request("held", prompts(1)[0], max_tokens=6))
    assert engine.scheduler.cache.tiers.imports.is_fetching
    assert len(engine.scheduler.admission.waiting.held) == 1
    executor.is_lost = True
    (event,) = engine.step()
    assert present(event.error).kind == "WorkerLost"
    assert not disk_of(engine).is_busy
    assert not engine.scheduler.cache.tiers.imports.opened
    engine.step()
    assert answers(engine, prompts(1))[0][0] == written[0][0]


def test_a_window_policy_hits_what_it_left_on_the_disk(open_engine: Start) -> None:
    """Under its own key: neither another policy nor none finds it."""
    policy = WindowPolicy(sinks=4, window=100)

    def ask(engine: Engine, policy: KvPolicy | None, number: int) -> tuple[list[int], int]:
        request = replace(make_request(f"{policy} {number}", prompts(12)[number], max_tokens=6), kv_policy=policy)
        (whole,) = run(engine, [request])
        return whole.token_ids, whole.num_cached_tokens

    first = open_engine()
    expected = [ask(first, policy, number) for number in range(12)]
    first.shutdown()
    second = open_engine()
    assert ask(second, WindowPolicy(sinks=4, window=99), 0)[1] == 0
    assert ask(second, None, 1)[1] == 0
    assert_cached([ask(second, policy, number) for number in range(12)], expected, least=100)
    assert usage(second).num_broken == usage(second).num_missing == 0


def test_a_refused_request_begins_no_import(open_engine: Start, written: Answers) -> None:
    engine = open_engine(max_num_seqs=1, max_waiting=1)
    for number in (5, 6):
        engine.add(make_request(f"first {number}", prompts(7)[number], max_tokens=6))
    with pytest.raises(Overloaded):
        engine.add(make_request("refused", prompts(1)[0], max_tokens=6))
    drain(engine)
    assert not engine.scheduler.cache.tiers.imports.opened


def test_a_slow_disk_does_not_stop_other_requests(
    open_engine: Start, written: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of the rank reads files, and one of the engine lists them; other prompts are answered meanwhile."""
    engine = open_engine()
    goes_on = hang(monkeypatch)

    def wait_and_list() -> ListedChanges:
        goes_on.wait()
        return ListedChanges([], [])

    monkeypatch.setattr(disk_of(engine).watch._listing, "look_at_all", wait_and_list)
    lister = threading.Thread(target=disk_of(engine).watch.look)
    lister.start()
    engine.add(make_request("slow", prompts(1)[0], max_tokens=6))
    assert len(engine.scheduler.admission.waiting.held) == 1
    events = []
    engine.add(make_request("quick", [3, 4, 5], max_tokens=6))
    while "quick" in engine.requests:
        events += engine.step()
    assert len(engine.scheduler.admission.waiting.held) == 1
    goes_on.set()
    lister.join()
    events += drain(engine)
    found = [event.usage for event in events if event.request_id == "slow" and event.usage is not None]
    assert found[0].num_cached_tokens >= found[0].num_disk_tokens >= 200


def test_a_disk_that_hangs_is_not_waited_for_and_not_asked_until_it_answers(
    open_engine: Start, written: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    disk, changes = disk_of(engine), engine.scheduler.cache.changes
    disk.watch._ended.set()  # no listing but those of the test
    answers_again = hang(monkeypatch).set
    monkeypatch.setattr("transom_worker.engine.disk_tier.LATE_S", 0.0)
    before = present(changes.rates)

    assert answers(engine, prompts(1)) == [(written[0][0], 0)]  # it has waited, and was computed then
    assert disk.is_away
    assert len(engine.scheduler.cache.tiers.imports.opened) == 1  # its blocks: the read may still write them
    rates = present(changes.rates)
    assert not rates.are_worth_reading(10**6, more_ns=rates.reading_ns([1] * len(before.read_ns)))
    assert not engine.has_work
    for number in (1, 2):
        engine.add(make_request(f"later {number}", prompts(3)[number], max_tokens=6))
        assert not engine.scheduler.admission.waiting.held
    drain(engine)

    answers_again()
    monkeypatch.undo()
    while disk.is_away:  # an idle engine asks once with each listing
        disk.watch.look()
        assert engine.has_work
        drain(engine)
    assert changes.rates.read_ns == before.read_ns
    assert not engine.scheduler.cache.tiers.imports.opened
    (tokens, cached), *_ = answers(engine, [prompts(8)[5]])
    assert (tokens, cached >= 200) == (written[5][0], True)


def test_a_late_load_that_fails_is_no_answer_of_the_disk(
    open_engine: Start, written: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    disk = disk_of(engine)
    disk.watch._ended.set()  # no listing but those of the test
    index = engine.scheduler.cache.tiers.disk
    num_files = index.num_blocks
    fails = hang(monkeypatch).set
    monkeypatch.setattr("transom_worker.engine.disk_tier.LATE_S", 0.0)
    answers(engine, prompts(1))
    assert disk.is_away
    (ticket,) = disk._loading

    disk.step_done(StepResult(step_id=0, failed=[ticket]))
    assert disk.is_away
    assert index.num_blocks < num_files
    assert not engine.scheduler.cache.tiers.imports.opened
    disk.take_news()
    assert disk.is_away
    disk.watch.look()
    disk.take_news()
    assert not disk.is_away  # no load is left that could tell, so the next one tries
    fails()


@pytest.mark.usefixtures("one_block_in_flight")
def test_a_load_whose_requests_have_ended_is_not_read_further(open_engine: Start, written: Answers) -> None:
    engine = open_engine()
    for name in ("gone", "gone too"):
        engine.add(make_request(name, prompts(1)[0], max_tokens=6))
    engine.step()
    engine.abort("gone")
    (loading,) = disk_of(engine)._loading.values()
    assert not loading.is_given_up
    engine.abort("gone too")
    assert loading.is_given_up
    while engine.has_work or engine.scheduler.cache.tiers.imports.opened:  # until the ranks say that they read no more
        engine.step()
    assert usage(engine).num_read <= 3
    assert not disk_of(engine)._loading
    assert answers(engine, prompts(1))[0][0] == written[0][0]


def hang(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have reads of the disk block from now on until the event that this returns is set."""
    goes_on = threading.Event()
    read = BlockFolder.read

    def wait_and_read(folder: BlockFolder, group: int, digest: bytes, num_bytes: int) -> bytes | None:
        goes_on.wait()
        return read(folder, group, digest, num_bytes)

    monkeypatch.setattr(BlockFolder, "read", wait_and_read)
    return goes_on


def test_a_missing_file_is_tried_once(open_engine: Start, tmp_path: Path, written: Answers) -> None:
    """The index learns of it from the failed read, without a listing, and of the other blocks' files by the next listing."""
    engine = open_engine()
    disk_of(engine).watch._ended.set()  # no listing but those of the test
    index = engine.scheduler.cache.tiers.disk
    num_files = index.num_blocks
    assert num_files == len(list(tmp_path.rglob("*.kv")))
    chain = chain_of(prompts(1)[0], 8, identity=engine.info.identity)
    (path,) = tmp_path.rglob(f"{chain[4].hex()}-0.kv")
    path.unlink()
    wholes = run(engine, [make_request(f"again {number}", prompts(1)[0], max_tokens=6) for number in range(3)])
    assert usage(engine).num_missing == 1
    assert [whole.num_cached_tokens for whole in wholes if whole.num_cached_tokens < 200]
    assert index.num_blocks < num_files - 16
    disk_of(engine).watch.look()
    disk_of(engine).take_news()
    assert index.num_blocks >= num_files - 1


@pytest.mark.parametrize("how", ["orderly", "a step failed", "the disk is too slow"])
def test_what_is_in_memory_at_an_orderly_end_alone_is_written(
    open_engine: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nothing was evicted, and a request is under way."""
    first = open_engine()
    expected = answers(first, prompts(2))
    first.add(make_request("under way", prompts(3)[2], max_tokens=100))
    first.step()
    assert not list(tmp_path.rglob("*.kv"))
    if how == "the disk is too slow":
        monkeypatch.setattr("transom_worker.engine.disk_tier.FLUSH_S", 0.0)
    first.fail(EngineDead("It ends.", loss_cause="exception" if how == "a step failed" else "stopped"))
    first.shutdown()
    if how == "orderly":
        assert_cached(answers(open_engine(), prompts(2)), expected)
    else:
        assert not list(tmp_path.rglob("*.kv"))


def test_an_idle_engine_tells_routers_of_files_that_others_write(open_engine: Start, tmp_path: Path) -> None:
    engine = open_engine()
    listening = OnThread(engine)
    other = open_engine()
    answers(other, prompts(2))
    other.shutdown()
    disk_of(engine).watch.look()  # as its thread does
    added: set[bytes] = set()
    while len(added) < len(list(tmp_path.rglob("*.kv"))):
        update = listening.delivered.get(timeout=60).kv
        for change in () if update is None else update.runs:
            assert (change.action, change.tier) == ("added", DISK)
            added.update(change.digests)
    assert added == {bytes.fromhex(path.name[:64]) for path in tmp_path.rglob("*.kv")}
    listening.thread.shutdown()

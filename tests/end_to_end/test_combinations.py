"""Everything on at once, and exact: every feature in every combination gives the tokens of a plain reference.

One table has the features: prefix cache, window repair, pool size (preemption), steps in flight, chunk size, the hybrid cache on or
off, one client or several that take turns, LoRA adapters; over models with full, window, sink + window and chunked layers, and
with short convolutions or recurrent states. Every combination has
resumed requests, and answers held to a grammar beside free ones. Every pair of values meets every day, every three values in
`make test-all`. Tiers, formats of the cache, steps that fail and several ranks have tests of their own, each with all else on.
"""

import itertools
import math
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.adapter_folders import adapt_checkpoint
from tests.checkpoints import make_checkpoint
from tests.core.grammar.vocabularies import json_grammar
from tests.device_ahead import AheadExecutor
from tests.engine_driver import Whole, make_engine, make_request, run
from tests.how_many import ALL_TESTS
from tests.lost_windows import lose_windows
from tests.matrices import covering, some_daily
from tests.memory_faults import PLACES, OutOfMemoryExecutor, Place
from tests.oracle_answers import oracle_answers
from tests.thread_ranks import ThreadRanks
from tests.tiny_checkpoints import VOCAB_SIZE, HybridCase, reference_greedy
from tests.worker.models.test_dense_families import DELTA_NET
from transom_core.contract import Adapter, Request
from transom_worker.engine.disk_tier import EngineDiskTier
from transom_worker.engine.engine import Engine
from transom_worker.execution.executor_factory import create_executor
from transom_worker.kvcache.tiers.disk.folder import BlockFolder
from transom_worker.scheduling import fair_preemption, in_flight_prefixes
from transom_worker.scheduling.sequence import Sequence
from transom_worker.scheduling.step import StepPlan

NUM_TOKENS = 24
ALL_LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 40, 47, 48, 49, 63, 65, 100, 200)
LENGTHS = ALL_LENGTHS if ALL_TESTS else (1, 7, 8, 9, 16, 17, 24, 25, 33, 40, 49, 63, 65, 100, 200)
# Model, and a pool in KiB so tight that the longest request just fits and eight at once must be preempted.
MODELS = {
    "full": (HybridCase(), 300),
    "SF": (HybridCase(window=24, pattern="SF"), 190),
    "SSF with sinks": (HybridCase(window=17, sinks=5, pattern="SSF"), 190),
    "windows only": (HybridCase(window=16, pattern="S"), 120),
    "CF": (HybridCase(chunk=32, pattern="CF"), 190),
    "SCF": (HybridCase(window=12, chunk=20, pattern="SCF"), 190),
    "states": (HybridCase(), 180),  # Qwen3.5
    "convolutions": (HybridCase(), 180),  # LFM2, whose rows slide even without the hybrid cache
}
CHUNKS = (16, 64, 1024)
AHEAD = 3  # two steps in flight, on a device that lags the host
# By index of the prompt: a list that is longer than any answer.
LIST = json_grammar({"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 100})
GRAMMARS = {i: LIST for i in range(3, len(LENGTHS), 5)}
CACHING, POOLS, IN_FLIGHT = ("repair", "on", "off"), ("tight", "roomy"), (1, 2, AHEAD)
WEIGHTS = (1.0, 2.0, 0.5)  # of clients
SETTINGS: dict[str, Any] = {"block_size": 8, "max_model_len": 256, "max_num_seqs": 8}


@dataclass(frozen=True, slots=True)
class Mix:
    """One combination of the features that an engine can switch."""

    model: str
    caching: str
    pool: str
    in_flight: int
    chunk: int
    hybrid: bool
    num_clients: int
    lora: bool


FEATURES = (list(MODELS), CACHING, POOLS, IN_FLIGHT, CHUNKS, (True, False), (1, len(WEIGHTS)), (False, True))
PAIRS, TRIPLES = covering(*FEATURES), covering(*FEATURES, strength=3)
MIXES = some_daily(dict.fromkeys([*PAIRS, *TRIPLES]), PAIRS)


def prompts(lengths: Iterable[int] = LENGTHS) -> list[list[int]]:
    """Prompts around every block and window edge; every third shares a long prefix with the one before."""
    made: list[list[int]] = []
    for i, n in enumerate(lengths):
        fresh = [(131 * i + 17 * j) % 1900 + 40 for j in range(n)]
        made.append(made[-1][: n // 2 * 2] + fresh[len(made[-1][: n // 2 * 2]) :] if i % 3 == 2 else fresh)
    return made


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoint of each model."""
    lfm2: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 96, "layer_types": ["conv", "full_attention"] * 2}
    convolutions = make_checkpoint(tmp_path_factory.mktemp("lfm2"), "lfm2", **lfm2)
    qwen = DELTA_NET | {"vocab_size": VOCAB_SIZE, "hidden_size": 96, "num_hidden_layers": 4}
    states = make_checkpoint(tmp_path_factory.mktemp("qwen"), "qwen3_5_text", **qwen)
    return dict.fromkeys(MODELS, tiny_model) | {"convolutions": convolutions, "states": states}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    return {
        name: oracle_answers(folders[name], prompts(), NUM_TOKENS, case, GRAMMARS) for name, (case, _) in MODELS.items()
    }


@pytest.fixture(scope="module")
def adapted(
    folders: dict[str, Path], expected: dict[str, list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Adapter, list[list[int]]]]:
    """An adapter of each model, and the answers if the requests that `uses_adapter` names use it."""
    adapters: dict[Path, tuple[Adapter, Path]] = {}
    found = {}
    for name, (case, _) in MODELS.items():
        model = folders[name]
        adapters[model] = adapters.get(model) or adapt_checkpoint(model, tmp_path_factory.mktemp("adapted"))
        adapter, merged = adapters[model]
        indices = [i for i in range(len(LENGTHS)) if uses_adapter(i)]
        grammars = {place: GRAMMARS[i] for place, i in enumerate(indices) if i in GRAMMARS}
        answers = oracle_answers(merged, [prompts()[i] for i in indices], NUM_TOKENS, case, grammars)
        others = dict(zip(indices, answers, strict=True))
        found[name] = adapter, [others.get(i, answer) for i, answer in enumerate(expected[name])]
        assert all(expected[name][i] != answer for i, answer in others.items())
    return found


def uses_adapter(index: int) -> bool:
    """Whether a prompt's request has an adapter, where any has: a prompt and the next one, which begins like it, both have."""
    return index // 3 % 2 == 1


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Hash blocks for which requests waited because another one computed them; here a few tokens are worth a wait."""
    waited: list[int] = []
    wait_for = in_flight_prefixes.InFlightPrefixes.wait_for

    def noted(
        self: in_flight_prefixes.InFlightPrefixes, sequence: Sequence, producer: Sequence, num_hash_blocks: int
    ) -> None:
        waited.append(num_hash_blocks)
        wait_for(self, sequence, producer, num_hash_blocks)

    monkeypatch.setattr(in_flight_prefixes, "MIN_SHARED_TOKENS", 8)
    # clients claim slots and memory from each other in short runs, too
    monkeypatch.setattr(fair_preemption, "SLICE_STEPS", 4)
    monkeypatch.setattr(in_flight_prefixes.InFlightPrefixes, "wait_for", noted)
    return waited


Margins = list[list[dict[int, float]]]  # by answer and step: log-probabilities of the likeliest tokens
CLOSE_CALL = 0.2  # nats


def ask(
    request_id: str,
    index: int,
    prompt: list[int],
    *,
    num_clients: int = len(WEIGHTS),
    adapter: Adapter | None = None,
    **more: Any,
) -> Request:
    """The request of one of `prompts`, from one of the clients."""
    request = make_request(request_id, prompt, max_tokens=NUM_TOKENS, grammar=GRAMMARS.get(index), **more)
    client = index * index % 5 % num_clients
    adapter = adapter if uses_adapter(index) else None
    return replace(request, client=str(client), client_weight=WEIGHTS[client], adapter=adapter)


def check(
    engine: Engine,
    want: list[list[int]],
    where: object,
    *,
    lose: bool = True,
    margins: Margins | None = None,
    num_clients: int = len(WEIGHTS),
    adapter: Adapter | None = None,
) -> Counter[str]:
    """All prompts twice: from nothing, and resumed over what is cached then, without its windows if `lose`.

    Returns how often what happened on the way, so that a test can say that nothing is exact because it did not happen.
    """
    asks = partial(ask, num_clients=num_clients, adapter=adapter)
    fresh = [asks(f"r{i}", i, p) for i, p in enumerate(prompts())]
    resumed = [asks(f"s{i}", i, p, resumed=want[i][: i % NUM_TOKENS]) for i, p in enumerate(prompts())]
    # The grammar is compiled and the adapter loaded before, so that how long that takes decides nothing here.
    run(engine, [replace(make_request("first", [5], max_tokens=1, grammar=LIST), adapter=adapter)])
    got = run(engine, fresh)
    compare([whole.token_ids for whole in got], want, where, margins)
    if lose:
        lose_windows(engine.scheduler.cache)
    rest = run(engine, resumed)
    tails = [w[i % NUM_TOKENS :] for i, w in enumerate(want)]
    later = margins and [answer[i % NUM_TOKENS :] for i, answer in enumerate(margins)]
    compare([whole.token_ids for whole in rest], tails, where, later)
    disks = [report.usage.disk for report in engine.executor.rank_reports() if report.usage.disk is not None]
    seen = Counter(
        preemptions=engine.scheduler.work.num_preemptions,
        swaps=engine.scheduler.work.num_swaps,
        loaded_blocks=sum(engine.scheduler.cache.tiers.loads.num_loaded),
        hits=sum(whole.num_cached_tokens for whole in got + rest),
        repaired=engine.scheduler.stats().outcome_tokens.get("repaired", 0),
        read_blocks=sum(disk.num_read for disk in disks),
        broken_blocks=sum(disk.num_broken for disk in disks),
    )
    engine.shutdown()
    return seen


def margins_of(answers: list[Whole]) -> Margins:
    return [
        [{one.token_id: one.logprob for one in (step.chosen, *step.top)} for step in answer.logprobs]
        for answer in answers
    ]


def compare(got: list[list[int]], want: list[list[int]], where: object, margins: Margins | None) -> None:
    """The tokens are equal. With `margins`, one answer in ten may go its own way at a step where its token was nearly as likely."""
    different = [i for i, tokens in enumerate(got) if tokens != want[i]]
    if margins is None:
        assert not different, where
        return
    assert len(different) <= len(want) // 10, where
    for i in different:
        step = next(step for step, token in enumerate(want[i]) if got[i][step] != token)
        likely = margins[i][step]
        assert likely[want[i][step]] - likely.get(got[i][step], -math.inf) < CLOSE_CALL, (where, i, step)


@pytest.mark.parametrize("mix", [pytest.param(Mix(*one.values), id=one.id, marks=one.marks) for one in MIXES])  # type: ignore[arg-type]
def test_a_combination_is_exact(
    folders: dict[str, Path],
    expected: dict[str, list[list[int]]],
    adapted: dict[str, tuple[Adapter, list[list[int]]]],
    waits: list[int],
    mix: Mix,
) -> None:
    case, tight_kib = MODELS[mix.model]
    slides = mix.hybrid or mix.model in ("convolutions", "states")
    engine = make_engine(
        str(folders[mix.model]),
        executor=AheadExecutor if mix.in_flight == AHEAD else create_executor,
        **case.settings(),
        **SETTINGS,
        hybrid_kv_cache=mix.hybrid,
        enable_prefix_caching=mix.caching != "off",
        window_repair=mix.caching == "repair",
        max_num_batched_tokens=mix.chunk,
        steps_in_flight=min(mix.in_flight, 2),
        enable_lora=mix.lora,
        max_loras=1,
        kv_cache_memory_bytes=8 << 20 if mix.pool == "roomy" else (tight_kib if slides else 300) << 10,
    )
    adapter, want = adapted[mix.model] if mix.lora else (None, expected[mix.model])
    seen = check(engine, want, mix, lose=mix.caching == "repair", num_clients=mix.num_clients, adapter=adapter)
    assert not isinstance(engine.executor, AheadExecutor) or engine.executor.queue.num_ahead > 0
    assert (seen["hits"] > 0) == (mix.caching != "off")
    # A request waits for a recurrent state only where the one that computes it has yet to keep a snapshot, which may be nowhere.
    assert bool(waits) == (mix.caching != "off") or (mix.model == "states" and not waits)
    if mix.pool == "tight" and mix.chunk > min(CHUNKS):  # with the smallest chunks few requests run side by side
        assert seen["preemptions"] > 0
    if mix.caching != "repair" or not slides or mix.model in ("full", "windows only", "states"):
        assert seen["repaired"] == 0
    elif mix.pool == "roomy":  # a tight pool seldom leaves a window to repair
        assert seen["repaired"] > 0


def test_an_answer_goes_on_after_a_repair(tiny_model: Path) -> None:
    """What was published after a repair serves the next turn: its tokens, too, are those of a cold run."""
    case = HybridCase(window=11, pattern="SSF")
    engine = make_engine(str(tiny_model), **case.settings(), block_size=8, max_model_len=256)
    conversation = prompts()[-1][:70]
    for turn in range(3):
        (answer,) = run(engine, [make_request(f"turn{turn}", conversation, max_tokens=30)])
        assert answer.token_ids == reference_greedy(tiny_model, conversation, 30, case, guess=answer.token_ids)
        assert (answer.num_cached_tokens > 0) == (turn > 0)
        conversation = [*conversation, *answer.token_ids, 77 + turn]
        if turn == 0:
            lose_windows(engine.scheduler.cache)
    assert engine.scheduler.stats().outcome_tokens["repaired"] > 0
    engine.shutdown()


@pytest.mark.parametrize("name", some_daily(MODELS, ["SCF", "states"]))
def test_steps_that_run_out_of_memory_are_exact(
    folders: dict[str, Path], expected: dict[str, list[list[int]]], name: str
) -> None:
    """With everything on, every fifth step fails, each time at another depth. A request that ends is sent again with its tokens."""
    case, tight_kib = MODELS[name]
    m = list(MODELS).index(name)
    engine = make_engine(
        str(folders[name]),
        executor=OutOfMemoryExecutor,
        **case.settings(),
        **SETTINGS,
        max_num_batched_tokens=CHUNKS[m % 3],
        steps_in_flight=IN_FLIGHT[m % 2],
        kv_cache_memory_bytes=tight_kib << 10,
    )
    executor = engine.executor
    assert isinstance(executor, OutOfMemoryExecutor)

    def fault(plan: StepPlan) -> Place | None:
        return PLACES[executor.num_faults % len(PLACES)] if plan.step_id % 5 == 3 and executor.num_faults < 24 else None

    executor.fault = fault
    got: dict[str, list[int]] = {f"r{i}": [] for i in range(len(prompts()))}
    for i, tokens in enumerate(prompts()):
        engine.add(ask(f"r{i}", i, tokens))
    num_ended = 0
    while engine.has_work:
        for event in engine.step():
            request_id, so_far = event.request_id, got[event.request_id]
            so_far += event.token_ids
            if event.error is not None:
                assert event.error.kind == "OutOfMemory"
                num_ended += 1
                i = int(request_id[1:])
                engine.add(ask(request_id, i, prompts()[i], resumed=so_far))
    assert executor.num_faults == 24
    assert num_ended > 12
    assert list(got.values()) == expected[name]
    check(engine, expected[name], name)  # what failed steps have left in the cache is right


@dataclass(frozen=True, slots=True)
class Plain:
    """What an engine with the same number formats, and nothing on, answers, and how likely other tokens were.

    `shrunk` is the size of the cache relative to one that is not quantised, `request_kib` that of the longest request's part.
    """

    want: list[list[int]]
    margins: Margins
    shrunk: float
    request_kib: float


def plain_answers(model: Path, name: str, formats: str) -> Plain:
    """The answers of one model under the formats of its cache."""
    settings: dict[str, Any] = {**MODELS[name][0].settings(), **SETTINGS}
    unquantised = make_engine(str(model), **settings)
    settings |= {"enable_prefix_caching": False, "max_num_batched_tokens": 1024}
    plain = make_engine(str(model), **settings, kv_cache_dtype=formats)
    answers = run(plain, [ask(f"r{i}", i, p, logprobs=8) for i, p in enumerate(prompts())])
    for engine in (plain, unquantised):
        engine.shutdown()
    request_bytes = plain.info.plan.request_bytes
    shrunk = request_bytes / unquantised.info.plan.request_bytes
    return Plain([answer.token_ids for answer in answers], margins_of(answers), shrunk, request_bytes / 1024)


def engine_with_tiers(
    model: Path, folder: Path, name: str, tight_kib: int, turn: int, chunk: int, *, mode: str, **settings: Any
) -> Engine:
    """An engine with a pool that is too small, a host tier and files below it; the second one has one step in flight."""
    return make_engine(
        str(model),
        **MODELS[name][0].settings(),
        **SETTINGS,
        **settings,
        device="cpu",
        max_num_batched_tokens=chunk,
        steps_in_flight=2 - turn,
        kv_cache_memory_bytes=tight_kib << 10,
        swap_space=f"{tight_kib}KiB",
        preemption_mode=mode,
        disk_cache=str(folder),
        disk_space="64MiB",
    )


# Model, formats of its cache, and how it preempts.
TIERED = [
    ("SSF with sinks", "sinks_window=fp8,full=int8", "swap"),
    ("SCF", "int4", "swap"),
    ("full", "int8", "swap"),
    ("CF", "full=int4", "swap"),
    ("SF", "fp8", "swap"),
    *((name, "auto", mode) for name in MODELS for mode in ("swap", "auto")),
]


TIERED_DAILY = [TIERED[0], ("SCF", "auto", "auto"), ("convolutions", "auto", "swap"), ("states", "auto", "swap")]


@pytest.mark.parametrize(("name", "formats", "mode"), some_daily(TIERED, TIERED_DAILY))
def test_tiers_are_exact(
    folders: dict[str, Path],
    tmp_path: Path,
    fast_reads: None,
    expected: dict[str, list[list[int]]],
    adapted: dict[str, tuple[Adapter, list[list[int]]]],
    name: str,
    formats: str,
    mode: str,
) -> None:
    """Blocks go to the host and to files, and come back, also into a second engine; preempted requests are swapped.

    Quantised caches are compared with an engine that has nothing on, but for close calls: the order of a sum depends on how many
    rows a step has. That moves a key by a few of float32's last bits, and over the edge between two stored numbers once in some
    ten thousand times.
    """
    _, tight_kib = MODELS[name]
    adapter: Adapter | None
    (adapter, want), margins = adapted[name], None
    if formats != "auto":
        plain = plain_answers(folders[name], name, formats)
        want, margins, adapter = plain.want, plain.margins, None
        # Fewer run at once, while others wait for the disk; a quarter is what pages of a small pool leave unused.
        tight_kib = int(max(0.7 * tight_kib * plain.shrunk, 1.25 * plain.request_kib))
    seen = Counter[str]()
    for turn in range(2):
        # With the smallest chunks few run side by side, and whether one is preempted depends on grammars' compile time.
        chunk = CHUNKS[turn] if formats != "auto" else CHUNKS[1 + turn]
        settings: dict[str, Any] = {"kv_cache_dtype": formats, "mode": mode, "enable_lora": adapter is not None}
        engine = engine_with_tiers(folders[name], tmp_path, name, tight_kib, turn, chunk, **settings)
        seen += check(engine, want, (name, turn), margins=margins, adapter=adapter)
    assert min(seen[what] for what in ("swaps", "loaded_blocks", "hits", "read_blocks")) > 0, seen
    assert seen["broken_blocks"] == 0


def test_a_disk_that_hangs_again_and_again_changes_no_answer(
    tiny_model: Path,
    tmp_path: Path,
    fast_reads: None,
    expected: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every ninth read blocks until the engine has given its load up, and then writes into the load's blocks."""
    name = "SSF with sinks"
    _, tight_kib = MODELS[name]
    is_away, num_reads, num_outages = threading.Event(), itertools.count(1), itertools.count()
    read, leave, come_back = BlockFolder.read, EngineDiskTier._leave, EngineDiskTier._come_back

    def read_late(folder: BlockFolder, group: int, digest: bytes, num_bytes: int) -> bytes | None:
        if next(num_reads) % 9 == 0:
            is_away.wait()
        return read(folder, group, digest, num_bytes)

    def note_and_leave(disk: EngineDiskTier) -> None:
        next(num_outages)
        leave(disk)
        is_away.set()

    def come_back_and_note(disk: EngineDiskTier) -> None:
        come_back(disk)
        is_away.clear()

    monkeypatch.setattr(EngineDiskTier, "_come_back", come_back_and_note)
    monkeypatch.setattr(BlockFolder, "read", read_late)
    monkeypatch.setattr(EngineDiskTier, "_leave", note_and_leave)
    monkeypatch.setattr("transom_worker.engine.disk_tier.LATE_S", 0.0)
    for turn in range(2):
        engine = engine_with_tiers(tiny_model, tmp_path, name, tight_kib, turn, CHUNKS[1 + turn], mode="swap")
        check(engine, expected[name], (name, turn))
        is_away.set()
    assert next(num_outages) > 1


@pytest.mark.parametrize(
    ("name", "ranks", "pool"),
    [
        ("SSF with sinks", 2, "tight"),
        *(pytest.param(name, 3, "roomy", marks=pytest.mark.exhaustive) for name in ("SCF", "convolutions")),
    ],
)
def test_several_ranks_are_exact(
    folders: dict[str, Path],
    adapted: dict[str, tuple[Adapter, list[list[int]]]],
    waits: list[int],
    name: str,
    ranks: int,
    pool: str,
) -> None:
    """With everything on; each rank has one of the two KV heads, so half the bytes hold the same number of blocks."""
    case, tight_kib = MODELS[name]
    engine = make_engine(
        str(folders[name]),
        **case.settings(),
        **SETTINGS,
        device="cpu",
        executor=partial(ThreadRanks, size=ranks),
        max_num_batched_tokens=64,
        steps_in_flight=2,
        kv_cache_memory_bytes=4 << 20 if pool == "roomy" else tight_kib << 9,
        swap_space="1MiB",
        preemption_mode="swap",
        enable_lora=True,
    )
    adapter, want = adapted[name]
    seen = check(engine, want, (name, ranks), adapter=adapter)
    assert seen["hits"] > 0
    assert waits
    assert seen["swaps" if pool == "tight" else "repaired"] > 0
    assert pool == "roomy" or seen["loaded_blocks"] > 0

"""Everything at once, over several workers: a prefill worker of two ranks and two decode workers, of which one dies, with a host
tier and a disk tier below pools that are too small, preempt by swap, and answer requests of every kind in one batch.

`test_combinations.py` and `test_policy_combinations.py` have the mixes within one engine, this file what only several workers have:
KV transfer, handover between roles and failover, on top of all of that.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import until
from tests.cluster.router.engine_workers import WIRES, LocalPeers, Mortal, answers_of, routed
from tests.end_to_end.test_combinations import LIST, Margins, compare, margins_of, prompts
from tests.end_to_end.test_policy_combinations import MIXED
from tests.engine_driver import make_engine, make_request, run
from tests.oracle_answers import oracle_answers
from tests.thread_ranks import ThreadRanks
from tests.tiny_checkpoints import HybridCase
from transom_core.contract import Request
from transom_core.settings.settings import Settings
from transom_worker.engine.startup import build_engine
from transom_worker.replica import WorkerReplica

NUM_TOKENS = 40
SETTINGS: dict[str, Any] = {"block_size": 8, "max_model_len": 512, "max_num_seqs": 6, "device": "cpu"}
HYBRID = HybridCase(window=17, sinks=5, pattern="SSF")
LENGTHS = (400, 260, 330, 150, 41, 290, 7, 210, 370, 16, 180, 240)
GRAMMARS = {2: LIST, 7: LIST}
POOL_KIB = 300  # of a hybrid whose cache is in float32; the longest request just fits
FLOAT_REQUEST_BYTES = 163_840  # of a request of the model's length in it


def requests(round_name: str, **fields: Callable[[int], Any]) -> list[Request]:
    """A request for each prompt; `fields` say its other fields, by its index."""
    plain = [
        make_request(f"{round_name}-{i}", prompt, max_tokens=NUM_TOKENS, grammar=GRAMMARS.get(i))
        for i, prompt in enumerate(prompts(LENGTHS))
    ]
    return [
        replace(request, choice_index=i, **{name: choose(i) for name, choose in fields.items()})
        for i, request in enumerate(plain)
    ]


@dataclass
class Cluster:
    """A prefill worker of two ranks, and two decode workers."""

    model: Path
    replicas: list[WorkerReplica]
    workers: list[Mortal]

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncIterator[Callable[[list[Request]], Any]]:
        async with routed(self.model, *self.workers, routing_policy="kv") as router:
            yield partial(answers_of, router)

    def count(self, name: str, **labels: str) -> float:
        """A metric of all workers together."""
        samples = [
            sample
            for replica in self.replicas
            for family in replica.engine.metrics.registry.collect()
            for sample in family.samples
        ]
        wanted = [one for one in samples if one.name == name and labels.items() <= one.labels.items()]
        assert wanted, name
        return sum(one.value for one in wanted)

    async def check_nothing_is_left(self) -> None:
        for replica in self.replicas:
            await until(lambda replica=replica: not replica.engine.requests)  # type: ignore[misc]
            groups = replica.engine.scheduler.stats
            await until(lambda groups=groups: not any(group.active_blocks for group in groups().groups))  # type: ignore[misc]


@contextlib.contextmanager
def cluster(model: Path, folder: Path, *, pool_kib: int, **settings: Any) -> Iterator[Cluster]:
    """Workers whose pools hold `pool_kib`; the prefill worker's ranks have one KV head each, so half of that."""
    peers = LocalPeers()
    replicas = []
    for number, role in enumerate(("prefill", "decode", "decode")):
        ranks = 1 + (role == "prefill")
        values = {
            **SETTINGS,
            "model": str(model),
            "role": role,
            "kv_cache_memory_bytes": (pool_kib << 10) // ranks,
            "swap_space": f"{pool_kib // ranks}KiB",
            "preemption_mode": "swap",
            "max_num_batched_tokens": 64,
            "steps_in_flight": ranks,
            "disk_cache": str(folder),
            "disk_space": "64MiB",
            **settings,
        }
        config = Settings.parse(**values).engine_config()
        executor = ThreadRanks(config, ranks) if ranks > 1 else None
        engine = build_engine(config, model_name="tiny", worker=f"w{number}", executor=executor)
        replica = WorkerReplica(config, "tiny", f"w{number}", engine=engine, peers=peers)
        peers.workers[f"w{number}"] = replica
        replicas.append(replica)
        # A prompt is worth moving, and a prefix worth loading.
        engine._rates._prefill_tokens, engine._rates._prefill_s = 100.0, 1.0
    try:
        yield Cluster(model, replicas, [Mortal(replica) for replica in replicas])
    finally:
        for replica in replicas:
            replica.shutdown()


async def check(
    start: Callable[[], AbstractContextManager[Cluster]],
    ask: Callable[[str], list[Request]],
    want: list[list[int]],
    margins: Margins | None,
) -> None:
    """All requests from nothing, over what is cached while a decode worker dies, and over what is on the disk after a restart."""
    with start() as some:
        async with some.answering() as answer:
            compare(await answer(ask("fresh")), want, "fresh", margins)
            some.workers[1].num_events = 30
            compare(await answer(ask("dying")), want, "dying", margins)
            assert some.workers[1].is_dead
        assert some.count("transom_kv_transfers_total", direction="in", outcome="fetched") > 0
        assert some.count("transom_preemptions_total", mode="swap") > 0
        assert some.count("transom_kv_host_moved_blocks_total", move="loaded") > 0
        assert some.count("transom_prefix_host_tokens_total") > 0
        await some.check_nothing_is_left()
    with start() as some:
        async with some.answering() as answer:
            compare(await answer(ask("restarted")), want, "restarted", margins)
        assert some.count("transom_disk_blocks_total", event="read") > 0
        assert some.count("transom_disk_blocks_total", event="broken") == 0
        await some.check_nothing_is_left()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", [pytest.param("auto", marks=pytest.mark.exhaustive), "sinks_window=fp8,full=int8"])
async def test_a_hybrid(tiny_model: Path, tmp_path: Path, dtype: str, wire: str) -> None:
    plain = make_engine(str(tiny_model), **HYBRID.settings(), **SETTINGS, kv_cache_dtype=dtype)
    answers = run(plain, [replace(one, params=replace(one.params, logprobs=8)) for one in requests("plain")])
    plain.shutdown()
    pool_kib = int(POOL_KIB * plain.info.plan.request_bytes / FLOAT_REQUEST_BYTES)
    want, margins = [whole.token_ids for whole in answers], None
    if dtype == "auto":
        assert want == oracle_answers(tiny_model, prompts(LENGTHS), NUM_TOKENS, HYBRID, GRAMMARS)
    else:
        margins = margins_of(answers)
    settings = {"kv_cache_dtype": dtype, "kv_transfer_wire": wire, **HYBRID.settings()}
    start = partial(cluster, tiny_model, tmp_path, pool_kib=pool_kib, **settings)
    await check(start, requests, want, margins)


@pytest.mark.parametrize("wire", WIRES)
async def test_kv_policies(tiny_model: Path, tmp_path: Path, wire: str) -> None:
    def ask(name: str) -> list[Request]:
        policies: Callable[[int], Any] = lambda i: MIXED[i % len(MIXED)]  # noqa: E731
        return requests(name, kv_policy=policies, kv_quality=lambda i: policies(i) is not None and i % 4 == 3)

    alone = make_engine(str(tiny_model), **SETTINGS, enable_prefix_caching=False)
    want = [run(alone, [request])[0].token_ids for request in ask("alone")]
    alone.shutdown()
    await check(partial(cluster, tiny_model, tmp_path, pool_kib=520, kv_transfer_wire=wire), ask, want, None)

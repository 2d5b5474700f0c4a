"""In-flight prefix deduplication: a prefix that several waiting prompts share is computed once, and each output is as if its
prompt ran alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine_driver import make_request, run
from tests.matrices import some_daily
from tests.tiny_checkpoints import HybridCase
from tests.worker.conftest import Start
from transom_core.contract import Request
from transom_worker.engine.engine import Engine

SHARED = [(17 * j) % 1900 + 40 for j in range(200)]
SETTINGS: dict[str, Any] = {"block_size": 8, "max_model_len": 256}
ROOMY_KIB = 8192
# Model, and a pool in KiB that cannot hold all of them at once.
MODELS = {
    "full": (HybridCase(), 300),
    "SSF with sinks": (HybridCase(window=17, sinks=5, pattern="SSF"), 190),
    "windows only": (HybridCase(window=16, pattern="S"), 60),
    "CF": (HybridCase(chunk=32, pattern="CF"), 190),
}


def requests() -> list[Request]:
    """Four choices, sampled and greedy, of one prompt; others that part from it; one that reads no cache."""
    one = make_request("choice", SHARED, max_tokens=16, temperature=0.9, top_p=0.9)
    choices = [replace(one, request_id=f"choice-{index}", choice_index=index) for index in range(4)]
    parted = [make_request(f"parted-{n}", [*SHARED[:n], *[60 + n] * (220 - n)], max_tokens=16) for n in (140, 163, 199)]
    return [*choices, make_request("greedy", SHARED, max_tokens=16), *parted, make_request("short", SHARED[:9])]


def alone(start: Start, case: HybridCase) -> list[list[int]]:
    engine = start(**case.settings(), **SETTINGS, enable_prefix_caching=False)
    return [run(engine, [request])[0].token_ids for request in requests()]


@pytest.mark.parametrize("name", some_daily(MODELS, ["SSF with sinks", "windows only"]))
def test_shared_prompts_give_the_outputs_of_separate_ones(start: Start, name: str) -> None:
    case, tight_kib = MODELS[name]
    want = alone(start, case)
    for chunk, steps_in_flight, kib in ((1024, 1, ROOMY_KIB), (1024, 2, ROOMY_KIB), (64, 2, tight_kib)):
        engine = start(
            **case.settings(),
            **SETTINGS,
            max_num_batched_tokens=chunk,
            steps_in_flight=steps_in_flight,
            kv_cache_memory_bytes=kib << 10,
        )
        got = run(engine, requests())
        assert [whole.token_ids for whole in got] == want, (chunk, steps_in_flight, kib)
        assert got[0].num_cached_tokens == 0
        if kib == ROOMY_KIB:
            assert [whole.num_cached_tokens for whole in got] == [
                0,
                *[192] * 4,
                136,
                160,
                192,
                0,
            ]  # whole units of 8 tokens
        assert (engine.scheduler.work.num_preemptions > 0) == (kib != ROOMY_KIB)


def test_a_prompt_on_the_disk_is_read_and_loaded_once(start: Start, tmp_path: Path, fast_reads: None) -> None:
    """Four choices wait for one import, and then for one load."""
    case = MODELS["SSF with sinks"][0]
    want = alone(start, case)

    def engine_on_disk() -> Engine:
        disk: dict[str, Any] = {"disk_cache": str(tmp_path), "disk_space": "64MiB", "swap_space": "8MiB"}
        return start(**case.settings(), **SETTINGS, **disk, kv_cache_memory_bytes=ROOMY_KIB << 10)

    first = engine_on_disk()
    run(first, requests()[:1])
    first.shutdown()  # which writes what is cached
    moved = []
    for count in (1, 4):
        engine = engine_on_disk()
        got = run(engine, requests()[:count])
        assert [whole.token_ids for whole in got] == want[:count]
        assert all(whole.num_cached_tokens == 192 for whole in got)
        (report,) = engine.executor.rank_reports()
        assert report.usage.disk is not None
        loaded = sum(group.loaded_blocks for group in engine.scheduler.stats().host_groups)
        moved.append((report.usage.disk.num_read, loaded))
        engine.shutdown()
    assert moved[0] == moved[1]
    assert min(moved[0]) > 0

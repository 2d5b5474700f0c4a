"""Days of traffic: nothing in an engine grows with the number of requests that it has ever seen.

All containers that can be reached from an engine are counted, after some requests and after many more of them; what is kept of
ended requests on purpose has a bound, which the test lowers so that it is reached.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.container_sizes import container_sizes, growth
from tests.engine_driver import drain, make_request
from tests.how_many import num_examples
from tests.worker.conftest import Start
from transom_core.telemetry import request_timelines
from transom_worker.engine.engine import Engine
from transom_worker.kvcache import manager
from transom_worker.kvcache.eviction import eviction_policy
from transom_worker.kvcache.eviction.ghosts import Ghosts
from transom_worker.kvcache.eviction.return_times import ReturnTimes
from transom_worker.kvcache.eviction.watch_ring import WatchRing
from transom_worker.kvcache.prefix.prefix_index import PrefixIndex

AT_ONCE = 64
NUM_REQUESTS = num_examples(daily=640, exhaustive=50_000)
# These have bounds of their own: five minutes of history by the second, four entries for each page of the pool, the vocabulary.
BOUNDED = (".block_map_log.history._entries", "cache.arena._longest", ".tokenizer._bytes", ".tokenizer.whole_texts[]")


def serve(engine: Engine, begin: int, end: int) -> None:
    """Requests of every fate: complete, aborted while they wait or run, late, refused; all with prompts of their own."""
    for first in range(begin, end, AT_ONCE):
        for number in range(first, first + AT_ONCE):
            prompt = [number % 97, number // 97 % 97, number // 97**2 % 97, *range(16)]
            request = make_request(f"cmpl-{number}-0-0", prompt, max_tokens=1 + number % 2)
            engine.add(replace(request, time_left_s=3600.0, priority=number % 3, cache_salt=f"client {number % 500}"))
            if number % 7 == 0:
                engine.abort(request.request_id)
            if number % 11 == 0:
                engine.add(replace(request, request_id=f"late-{number}", time_left_s=0.0))
        engine.step()
        engine.abort(f"cmpl-{first + 1}-0-0")
        drain(engine)
        engine.metrics.text()
        engine.scheduler.cache.changes.take()


@pytest.fixture
def low_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "PrefixIndex", partial(PrefixIndex, remembered=200))
    monkeypatch.setattr(eviction_policy, "ReturnTimes", lambda: ReturnTimes(WatchRing(capacity=256)))
    monkeypatch.setattr(eviction_policy, "Ghosts", lambda: Ghosts(capacity=256))
    init = request_timelines.TimelineStore.__init__
    monkeypatch.setattr(
        request_timelines.TimelineStore,
        "__init__",
        lambda store: init(store, max_timelines=100, max_ended_events=500),
    )


@pytest.mark.usefixtures("low_bounds")
def test_an_engine_does_not_grow_with_its_requests(start: Start) -> None:
    engine = start(max_num_seqs=AT_ONCE, kv_cache_memory_bytes="1MiB", max_num_batched_tokens=4096)
    serve(engine, 0, NUM_REQUESTS)
    before = container_sizes(engine)
    serve(engine, NUM_REQUESTS, 3 * NUM_REQUESTS)
    grown = growth(before, container_sizes(engine), least=NUM_REQUESTS // 20)
    assert [path for path in grown if not any(known in path for known in BOUNDED)] == []

"""The usage that ranks in processes of their own report, and the worker's metrics of it."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from tests.engine_driver import make_engine, make_request, run
from tests.worker.ranks.rank_watch import process_ids
from transom_worker.scheduling.step import StepPlan


def test_every_rank_reports_its_usage(tiny_model: Path) -> None:
    engine = make_engine(str(tiny_model), device="cpu", tensor_parallel_size=2)
    executor = engine.executor
    try:
        assert [report.usage.busy_s for report in executor.rank_reports()] == [0.0, 0.0]
        run(engine, [make_request("a", list(range(5, 45)), max_tokens=4)])
        give_up_s, step_ids = time.monotonic() + 120, itertools.count(1_000)
        while not all(
            report.usage.busy_s for report in executor.rank_reports()
        ):  # the first report of a rank is on its way
            assert time.monotonic() < give_up_s
            executor.submit(StepPlan(step_id=next(step_ids)))
            executor.receive()
        engine.publish()
        reports = executor.rank_reports()
        assert [report.info.process_id for report in reports] == process_ids(engine)
        for report in reports:
            assert 0 < report.usage.forward_s < report.usage.busy_s
            assert report.info.memory.kv_bytes > 0
        page = engine.metrics.text().decode()
        for report in reports:
            assert f'pid="{report.info.process_id}"' in page
        assert 'host="127.' not in page
        assert 'tensor_parallel_size="2"' in page
    finally:
        engine.shutdown()

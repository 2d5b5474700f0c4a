"""A warm-up runs every kind of step before the first request, and writes to no block that a sequence could read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine_driver import whole_warm_up
from tests.matrices import some_daily
from tests.worker.execution.hand_scheduler import engine_config, make_runner
from transom_core.contract import HeavyPolicy, KvPolicy, WindowPolicy
from transom_core.settings.settings import Settings
from transom_kernels.cpu import kernel as compiled
from transom_worker.bench.policies.policy_runs import make_request, run_together
from transom_worker.engine.startup import build_engine
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.runner import ModelRunner
from transom_worker.execution.setup.dummy_run import warm_up, worst_case_step
from transom_worker.execution.tiers.slabs import allocate_slab, block_rows
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.parallel.communicator import SINGLE_RANK, Parallel
from transom_worker.sampling.logprobs import MAX_ROWS_PER_PASS
from transom_worker.sampling.sharded import ShardedSampler
from transom_worker.scheduling.step import StepPlan

CPU = torch.device("cpu")
EVERY_KIND = {"compiles": True, "compiles_by_rows": True, "takes_policies": False}
SINGLE = Parallel(rank=0, size=1, comm=SINGLE_RANK)


class RecordingBuilder(BatchBuilder):
    """A builder over a runner's layout, in a slab of its own, that records the plans of dummy runs."""

    def __init__(self, runner: ModelRunner) -> None:
        layout = runner.info.layout
        self.slab = allocate_slab(layout, CPU)
        super().__init__(layout, self.slab, CPU)
        self.plans: list[StepPlan] = []

    def build(self, plan: StepPlan, store: SequenceStore) -> ForwardBatch:
        self.plans.append(plan)
        return super().build(plan, store)


@pytest.fixture(scope="module")
def runner(tiny_model: Path) -> ModelRunner:
    return make_runner(engine_config(tiny_model, window=5, sinks=3, window_pattern="SF"))


@pytest.mark.parametrize("max_model_len", [1, 3, 4, 100])
def test_warm_up_stays_within_the_limits(runner: ModelRunner, max_model_len: int) -> None:
    model, builder = runner._forward._model, RecordingBuilder(runner)
    assert warm_up(model, builder, max_tokens=64, max_model_len=max_model_len, **EVERY_KIND).shape[0] == 1
    steps = [(plan.start[0], plan.count[0]) for plan in builder.plans]
    assert all(start + count <= max_model_len and count <= 64 for start, count in steps)
    if max_model_len == 100:
        assert steps == [(0, 16), (0, 64), (84, 16), (84, 3), (84, 1), (0, 1)]


def test_warm_up_writes_to_dump_blocks_only(runner: ModelRunner) -> None:
    builder = RecordingBuilder(runner)
    warm_up(runner._forward._model, builder, max_tokens=64, max_model_len=100, **EVERY_KIND)
    assert builder.slab.any()
    for group in range(len(builder.layout.groups)):
        block_rows(builder.layout, builder.slab, group)[builder.layout.dump_block(group)] = 0
    assert not builder.slab.any()


def test_the_worst_case_wants_every_position_but_never_its_logits_together(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a request for prompt log-probabilities needs no more memory than was measured."""
    model, builder, sampler, num_rows = runner._forward._model, RecordingBuilder(runner), ShardedSampler(SINGLE), [0]
    logits = model.logits

    def counted(hidden_RN: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden_RN))
        return logits(hidden_RN)

    monkeypatch.setattr(model, "logits", counted)
    result = worst_case_step(model, builder, [93, 90, 1], sampler, start=0)
    assert [len(result.prompt_logprobs[b]) for b in (0, 1)] == [92, 89]
    assert all(logprobs is not None and len(logprobs.top) == 20 for logprobs in result.logprobs)
    assert max(num_rows) == MAX_ROWS_PER_PASS


POLICIES: dict[str, KvPolicy | None] = {
    "full": None,
    "window": WindowPolicy(sinks=4, window=40),
    "heavy": HeavyPolicy(sinks=4, budget=80),
}


@pytest.mark.parametrize("kv_cache_dtype", some_daily(["auto", "int8"], daily=["auto"]))
def test_requests_load_no_kernel_that_the_start_has_not(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str
) -> None:
    compiled.cpu_kernel.cache_clear()  # as in a new process: what is used from now on is loaded again
    loaded: list[str] = []
    cached_code = compiled._cached_code

    def noted(kernel: compiled.CpuKernel) -> Any:
        loaded.append(kernel.name)
        return cached_code(kernel)

    monkeypatch.setattr(compiled, "_cached_code", noted)
    given = {"model": str(tiny_model), "device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": "8MiB"}
    with whole_warm_up():
        engine = build_engine(Settings.parse(**given, kv_cache_dtype=kv_cache_dtype, max_num_seqs=4).engine_config())
    try:
        assert loaded
        loaded.clear()
        for policy in POLICIES.values():
            run_together(engine, [make_request(range(5, 200), policy, max_tokens=4, prompt_logprobs=1)])
            run_together(engine, [make_request(range(5, 200), policy, max_tokens=4) for _ in range(3)])
            if policy is not None:
                run_together(engine, [replace(make_request(range(5, 99), policy, max_tokens=20), kv_quality=True)])
        assert loaded == []
    finally:
        engine.shutdown()

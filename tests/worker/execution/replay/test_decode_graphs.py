"""Graphs that are captured at start-up, captures that fail, and the comparison of a replay with a forward pass.

`test_interpreted_models` compares engines that replay graphs with engines that do not.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapter_folders import adapt_checkpoint
from tests.worker.execution.hand_scheduler import HandScheduler, make_runner

pytest.importorskip("triton")

from tests.graph_recorder import RecordedGraph, RecorderDevice
from tests.tiny_checkpoints import reference_greedy, tiny_llama
from transom_core.settings.settings import Settings
from transom_kernels.launch import INTERPRETED, prefer
from transom_kernels.moe.row_blocks import MAX_PAIRS, block_rows
from transom_kernels.paged_attention.triton import tuning, work_items
from transom_worker.execution.replay import backends, decode_sizes, graph_warm_up
from transom_worker.execution.replay.decode_replay import ReplayMismatch, check_replay
from transom_worker.execution.runner import ModelRunner
from transom_worker.models.parallel.communicator import Parallel
from transom_worker.scheduling.step import NO_ADAPTER

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU")
SIZE: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1}
SETTINGS: dict[str, Any] = {
    "kv_cache_memory_bytes": "1MiB", "block_size": 4, "num_threads": 1, "max_num_batched_tokens": 8, "dtype": "float32",
    "window": 5, "sinks": 2, "window_pattern": "SF",
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("graphed"), **SIZE)


@contextmanager
def runner_of(
    checkpoint: Path,
    device: RecorderDevice | None,
    *,
    parallel: Parallel | None = None,
    on_busy: Callable[[], None] = lambda: None,
    mixed_tokens: tuple[int, ...] = (),
    **settings: Any,
) -> Iterator[ModelRunner]:
    """A runner on interpreted kernels that records on `device`; mixed steps have sizes of `mixed_tokens`."""
    with prefer("interpreted"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "capture_device", lambda _: device)
        patch.setattr(decode_sizes, "MIXED_TOKENS", mixed_tokens)
        patch.setattr(decode_sizes, "MIXED_SEQS", 3)
        patch.setattr(decode_sizes, "FEW_SEQS", 2)
        patch.setattr(decode_sizes, "SHORT_TOKENS", 8)
        patch.setattr(work_items, "WHOLE_UNITS", 0.5)  # so that a dozen tokens are shared out
        patch.setattr(work_items, "LEAST_HALF_UNITS", 1)
        patch.setattr(tuning, "SPLIT_UNIT_BYTES", 256)
        patch.setattr(graph_warm_up, "LIMIT_S", 100 * graph_warm_up.LIMIT_S)  # on a machine that is busy
        config = Settings.parse(model=str(checkpoint), **(SETTINGS | settings)).engine_config()
        yield make_runner(config, parallel=parallel, on_busy=on_busy)


class BakedGraph(RecordedGraph):
    """Fakes a graph that keeps a number of the first step: it does not read the second step's inputs."""

    def __init__(self, run: Callable[[], None]) -> None:
        run()

    def replay(self) -> None:
        pass


class BakingDevice(RecorderDevice):
    """Its first graphs are wrong."""

    def __init__(self, num_wrong: int) -> None:
        super().__init__()
        self.num_wrong = num_wrong

    def capture(self, run: Callable[[], None]) -> RecordedGraph:
        self.num_wrong -= 1
        return BakedGraph(run) if self.num_wrong >= 0 else super().capture(run)


class FailingDevice(RecorderDevice):
    """Captures some graphs, and fails then."""

    def __init__(self, num_graphs: int = 1) -> None:
        super().__init__()
        self.num_graphs = num_graphs

    def capture(self, run: Callable[[], None]) -> RecordedGraph:
        if len(self.graphs) >= self.num_graphs:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().capture(run)


@pytest.mark.parametrize(
    ("device", "message", "num_wrong"),
    [
        (
            BakingDevice(num_wrong=9),
            "steps of 1 sequences at level 0 run without CUDA graphs, which is slower: 1 sequences at level 0: logits of up to",
            2,
        ),
        (FailingDevice(), "capturing 1 sequences at level 0 failed (RuntimeError: operation not permitted", 0),
    ],
    ids=["a graph that is wrong", "a device that fails"],
)
def test_what_fails_at_start_turns_graphs_off(
    checkpoint: Path, device: RecorderDevice, message: str, num_wrong: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), runner_of(checkpoint, device, max_num_seqs=2, max_model_len=8) as runner:
        assert message in caplog.text
        hand = HandScheduler(runner.info.layout)
        hand.add(0, [5, 6])
        hand.run(runner, {0: 2}, {0: 1})
        assert (runner.usage.num_graph_steps, runner.usage.num_eager_steps, runner.info.num_graphs) == (0, 2, 0)
        assert runner.usage.num_wrong_graphs == num_wrong


def test_a_graph_that_is_wrong_is_captured_again_and_costs_its_own_size(checkpoint: Path) -> None:
    """Both graphs of two sequences are wrong, and the first of one sequence. The cache is blank afterwards. A rank that
    captures for minutes without a kernel to compile gives a sign of life at each size."""
    lives: list[str] = []
    device = BakingDevice(num_wrong=3)
    with runner_of(checkpoint, device, on_busy=lambda: lives.append("size"), max_num_seqs=2, max_model_len=8) as runner:
        assert runner.info.num_graphs == 1
        assert lives == ["size"] * 2
        assert not runner.tiers.device.slab[: runner.info.layout.pool_bytes].any()


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("Tried to allocate 20 MiB")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "_RandomSteps.fill_blocks",
            out_of_memory,
            "capturing them failed (OutOfMemoryError: Tried to allocate 20 MiB)",
        ),
        ("LIMIT_S", -1.0, "from 2 sequences at level 0 on run without CUDA graphs: capturing took too long"),
    ],
    ids=["no memory for random blocks", "no time"],
)
def test_a_start_without_memory_or_time_runs_without_graphs(
    checkpoint: Path,
    name: str,
    value: Any,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(f"transom_worker.execution.replay.graph_warm_up.{name}", value)
    device = RecorderDevice()
    with caplog.at_level(logging.WARNING), runner_of(checkpoint, device, max_num_seqs=2, max_model_len=8) as runner:
        assert message in caplog.text
        assert (runner.info.num_graphs, runner._forward._replay, device.graphs) == (0, None, [])


def test_infinite_logits_do_not_void_the_check() -> None:
    """The tolerance goes by the largest finite logit."""
    right = torch.tensor([[1.0, -torch.inf, torch.nan]])
    check_replay("a step", right.clone(), right, tolerance=1e-4)
    for wrong in ([[2.0, -torch.inf, torch.nan]], [[1.0, 5.0, torch.nan]], [[1.0, -torch.inf, 0.0]]):
        with pytest.raises(ReplayMismatch):
            check_replay("a step", torch.tensor(wrong), right, tolerance=1e-4)


def test_experts_of_many_sequences_are_found_in_a_graph() -> None:
    """Beyond `MAX_PAIRS` torch sorts: a thousand rows, more than random steps here have."""
    experts = torch.randint(8, (MAX_PAIRS + 7,), generator=torch.Generator().manual_seed(0))
    pairs, owners = (found.clone() for found in block_rows(experts, 8, 16))

    def run() -> None:
        for out, found in zip((pairs, owners), block_rows(experts, 8, 16), strict=True):
            out.copy_(found)

    with torch.inference_mode():
        graph = RecorderDevice().capture(run)
        experts.copy_(experts.flip(0).clamp(max=5))
        graph.replay()
    wanted = block_rows(experts, 8, 16)
    assert torch.equal(pairs, wanted[0])
    assert torch.equal(owners, wanted[1])


def test_a_graph_reads_the_adapters_of_each_step(checkpoint: Path, tmp_path: Path) -> None:
    """The first of two sequences has an adapter, and then the second; the same graphs compute both."""
    adapter, merged = adapt_checkpoint(checkpoint, tmp_path)
    how: dict[str, Any] = {"window": None, "sinks": 0, "window_pattern": "S", "enable_lora": True, "max_lora_rank": 8}
    with runner_of(checkpoint, RecorderDevice(), max_num_seqs=2, max_model_len=8, **how) as runner:
        runner.load_adapter(1, adapter.path)
        hand = HandScheduler(runner.info.layout)
        for adapted in (0, 1):
            for seq_id in (0, 1):
                hand.add(seq_id, [5, 6, 7], adapter_slot=1 if seq_id == adapted else NO_ADAPTER)
            hand.run(runner, {0: 3, 1: 3}, {0: 1, 1: 1}, {0: 1, 1: 1})
            for seq_id in (0, 1):
                right = reference_greedy(merged if seq_id == adapted else checkpoint, [5, 6, 7], 3)
                assert hand.sequences[seq_id].tokens[3:] == right
                hand.finish(seq_id)
        assert (runner.usage.num_graph_decodes, runner.usage.num_eager_decodes) == (4, 0)

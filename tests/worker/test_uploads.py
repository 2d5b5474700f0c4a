"""One copy brings all arrays of a step to the device, with the values that the CPU reads, and no array is overwritten too early."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.checkpoints import make_checkpoint, prompt
from tests.engine_driver import make_engine, make_request, run
from tests.late_uploads import LateUploads, PromptUploads
from tests.worker.execution.hand_scheduler import HandScheduler, engine_config, make_runner
from tests.worker.execution.policy_scheduler import PolicyScheduler
from tests.worker.execution.test_policy_steps import start_runner
from tests.worker.models.deepseek_v4_checkpoint import make_deepseek_v4
from transom_core.contract import WindowPolicy
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.layers.policy_rows import MixedBatch
from transom_worker.uploads import ALIGNMENT


def test_the_host_never_overwrites_what_the_device_still_reads() -> None:
    """More uploads than buffers, of sizes that make buffers grow."""
    rng, uploads = np.random.default_rng(0), LateUploads(per_step=2)
    sent = []
    for size in (3, 1, 40, 0, 200, 7, 7, 7, 1_000, 2):
        arrays: dict[str, NDArray[Any]] = {
            "long": rng.integers(0, 1 << 60, size),
            "table": rng.integers(0, 1 << 30, (size, 3)).astype(np.int32)[:, ::2],
            "float": rng.random(size).astype(np.float32),
            "bits": rng.integers(0, 255, (size, 5)).astype(np.uint8),
        }
        sent.append((arrays, uploads.tensors(arrays)))
    uploads.arrive()
    for arrays, tensors in sent:
        for name, array in arrays.items():
            assert torch.equal(tensors[name], torch.from_numpy(np.ascontiguousarray(array)))
            assert tensors[name].is_contiguous()
            assert not len(array) or tensors[name].data_ptr() % ALIGNMENT == sent[0][1]["long"].data_ptr() % ALIGNMENT


def test_two_steps_in_flight_do_not_wait() -> None:
    uploads = LateUploads(per_step=3)
    for number in range(6):
        tensor = uploads.tensors({"number": np.array([number])})["number"]
        assert tensor.tolist() != [number], "the device has read: the host has waited"
    assert uploads.copied == [ALIGNMENT] * 6


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ForwardBatch]]:
    """All batches of a test, which went to a device in one copy each, and are what the host has."""
    seen: list[ForwardBatch] = []

    def checked(make: Callable[..., ForwardBatch]) -> Callable[..., ForwardBatch]:
        def both_ways(self: BatchBuilder, *arguments: Any) -> ForwardBatch:
            shared, kept, uploads = make(self, *arguments), self._uploads, PromptUploads()
            self._uploads = uploads
            seen.append(make(self, *arguments))
            self._uploads = kept
            assert len(uploads.copied) == 1
            check_equal(seen[-1], shared)
            return seen[-1]

        return both_ways

    for name in ("batch", "measured_batch"):
        monkeypatch.setattr(BatchBuilder, name, checked(getattr(BatchBuilder, name)))
    yield seen
    assert len(seen) > 5


def check_equal(mine: Any, wanted: Any) -> None:
    """Compare all fields; tensors by dtype, shape and numbers."""
    assert type(mine) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert mine.dtype == wanted.dtype
        assert torch.equal(mine, wanted)
    elif dataclasses.is_dataclass(wanted):
        for field in dataclasses.fields(wanted):
            check_equal(getattr(mine, field.name), getattr(wanted, field.name))
    elif isinstance(wanted, tuple):
        for one, other in zip(mine, wanted, strict=True):
            check_equal(one, other)
    else:
        assert mine == wanted


@pytest.mark.parametrize("pattern", ["F", "CSF"])
def test_prompts_and_decodes(pattern: str, tiny_model: Path, packed: list[ForwardBatch]) -> None:
    windows = {"window": 6, "chunk": 20} if len(pattern) > 1 else {}
    runner = make_runner(engine_config(tiny_model, enforce_eager=True, window_pattern=pattern, **windows))
    hand = HandScheduler(runner.info.layout)
    hand.add(0, [5] * 23)
    hand.add(1, [7] * 30)
    hand.run(runner, {0: 10}, {0: 13, 1: 5}, {0: 1, 1: 25}, {0: 1, 1: 1}, {1: 1})
    assert {len(batch.groups) for batch in packed} == {len(pattern)}


def test_policies(packed: list[ForwardBatch], tmp_path: Path) -> None:
    """Rows with and without KV policies, some beyond the trained length, with measured ones."""
    folder = make_checkpoint(tmp_path, "llama", max_position_embeddings=64)
    hand = PolicyScheduler(start_runner(folder, enforce_eager=True))
    hand.add_row(0, prompt(60), WindowPolicy(sinks=3, window=11), quality=True)
    hand.add_row(1, prompt(20))
    hand.step({0: 60})
    hand.step({0: 1, 1: 20}, mass=True)
    hand.step({0: 1}, measure=True)
    for _ in range(5):
        hand.step({0: 1, 1: 1}, measure=True)
    mixed = [group for batch in packed for group in batch.groups if isinstance(group, MixedBatch)]
    assert {group.other_rows is None for group in mixed} == {True, False}
    assert any(group.meter is not None and group.meter.masked is not None for group in mixed)
    assert any(batch.sink_positions is not None for batch in packed)


def test_compressed_layers(packed: list[ForwardBatch], tmp_path: Path) -> None:
    engine = make_engine(str(make_deepseek_v4(tmp_path)), dtype="float32", max_num_batched_tokens=32, max_model_len=256)
    run(engine, [make_request(str(length), prompt(length), max_tokens=4) for length in (50, 5)])
    engine.shutdown()
    assert any(group.start is not batch.groups[0].start for batch in packed for group in batch.groups)

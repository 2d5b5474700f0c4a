"""Decode steps as captured CUDA graphs: the host writes a step's inputs, copies them once, and replays a graph.

Every size of decode steps is captured at start-up (`decode_sizes`). A graph is used only if a replay over new inputs gives the same
logits as a forward pass over these inputs. If a capture or a check fails, all decode steps run eagerly.

Legend: B sequences of a size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from transom_kernels.paged_attention.triton.work_items import WorkPlan
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.execution.replay.decode_replay import DecodeReplay, PolicyVariant, check_replay
from transom_worker.execution.replay.decode_sizes import DecodeSize, DecodeSizes
from transom_worker.execution.replay.graph_capture import CudaCapture, Replayable
from transom_worker.execution.replay.graph_inputs import (
    GraphInputs,
    GroupLaunchKey,
    buffer_bytes,
    plan_work_by_key,
    size_of,
)
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.model import Model

# Accepted differences, as a share of the largest logit. Equal bits are expected, but cuBLAS promises them only on one stream and
# with one workspace, and graphs are captured on a stream of their own. A graph that reads a wrong input differs by far more. With a
# quantised cache, a tiny difference may round a key to the next stored number.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
QUANTISED_TOLERANCE = 5e-2


@dataclass(slots=True)
class _Captured:
    """One size's graph and the input arrays that it reads."""

    inputs: GraphInputs
    graph: Replayable


class DecodeGraphs(DecodeReplay):
    """The graphs of one model's decode steps, by size."""

    def __init__(
        self,
        model: Model,
        builder: BatchBuilder,
        sizes: DecodeSizes,
        launch_keys: Sequence[GroupLaunchKey],
        device: CudaCapture,
    ) -> None:
        """`launch_keys` are the launch keys of all attention layers, see `launches.launch_keys_of`."""
        self.builder, self.sizes = builder, sizes
        self._model, self._launch_keys, self._device = model, tuple(launch_keys), device
        self.tolerance = max(TOLERANCES.get(cache.k.dtype, QUANTISED_TOLERANCE) for cache in builder.caches)
        num_bytes = max(buffer_bytes(size, sizes, launch_keys, builder) for size in sizes.all)
        self._host = device.host_buffer(num_bytes)
        self._inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=builder.device)
        num_columns = model.vocab.stop - model.vocab.start
        # One tensor for all graphs: one for each size would add up to much memory.
        self._logits_BV = torch.zeros(sizes.num_seqs[-1], num_columns, dtype=torch.float32, device=builder.device)
        self._captured: dict[DecodeSize, _Captured] = {}
        self._prepared: GraphInputs | None = None
        self.num_wrong = 0  # sizes that were dropped

    @property
    def token_ids(self) -> torch.Tensor:
        """See `DecodeReplay.token_ids`."""
        assert self._prepared is not None
        return self._prepared.arrays.device["token_ids"]

    @property
    def num_graphs(self) -> int:
        """See `DecodeReplay.num_graphs`."""
        return len(self._captured)

    def prepare(
        self, arrays: StepArrays, policy: PolicyVariant | None, eager_batch: Callable[[], ForwardBatch]
    ) -> Callable[[], torch.Tensor] | None:
        """See `DecodeReplay.prepare`. A step with KV policies always runs eagerly."""
        if not arrays.only_decodes or policy is not None:
            return None
        work_plans = plan_work_by_key(arrays, self._launch_keys)
        size = self.sizes.smallest_for(size_of(arrays, work_plans))
        captured = None if size is None else self._captured.get(size)
        if captured is None:
            return None
        self._load(captured.inputs, arrays, work_plans)
        self._prepared = captured.inputs
        return partial(self._replayed, captured.graph, len(arrays.token_ids))

    def capture(self, size: DecodeSize, first: StepArrays, second: StepArrays) -> None:
        """Capture one size over the first step, and check the graph over the second. Both steps run, and write into the cache.

        Raises:
            ReplayMismatch: a replay over the second step gives other logits than its forward pass.  Any other error: the device
                cannot capture.
        """
        inputs = GraphInputs(size, self.sizes, self._launch_keys, self.builder, host=self._host, device=self._inputs)
        self._load(inputs, first, plan_work_by_key(first, self._launch_keys))

        def run() -> None:
            self._logits_BV[: size.num_seqs].copy_(self._model.forward(inputs.forward_batch()))

        graph = self._device.capture(run)
        self._load(inputs, second, plan_work_by_key(second, self._launch_keys))
        replayed_BV, logits_BV = self._replayed(graph, size.num_seqs), self._model.forward(inputs.forward_batch())
        check_replay(str(size), replayed_BV, logits_BV, tolerance=self.tolerance)
        self._captured[size] = _Captured(inputs, graph)

    def first_wrong_layer(self, size: DecodeSize, first: StepArrays, second: StepArrays) -> int | None:
        """Capture a size that `capture` found wrong once more, with sums over each layer's outputs.

        Returns the first layer whose sums in a replay differ from those in a forward pass; None if no layer's do.
        """
        inputs = GraphInputs(size, self.sizes, self._launch_keys, self.builder, host=self._host, device=self._inputs)
        shape = (2, self._model.architecture.num_layers, size.num_seqs)  # sums, and sums of absolute values
        sums, replayed = (torch.zeros(shape, device=self.builder.device) for _ in range(2))

        def run() -> None:
            batch = inputs.forward_batch()
            batch.after_layer = note
            self._model.forward(batch)

        def note(layer: int, x_BN: torch.Tensor) -> None:
            sums[0, layer], sums[1, layer] = x_BN.float().sum(-1), x_BN.float().abs().sum(-1)

        self._load(inputs, first, plan_work_by_key(first, self._launch_keys))
        graph = self._device.capture(run)
        self._load(inputs, second, plan_work_by_key(second, self._launch_keys))
        graph.replay()
        replayed.copy_(sums)
        run()
        differs = ~((replayed[0] - sums[0]).abs() <= self.tolerance * sums[1])  # NaN differs
        wrong = differs.any(-1).tolist()
        return wrong.index(True) if any(wrong) else None

    def drop(self, size: DecodeSize) -> None:
        """Run steps of a size eagerly, because its graph on this or another rank is wrong."""
        self._captured.pop(size, None)
        self.num_wrong += 1

    def _replayed(self, graph: Replayable, num_seqs: int) -> torch.Tensor:
        graph.replay()
        return self._logits_BV[:num_seqs]

    def _load(self, inputs: GraphInputs, arrays: StepArrays, work_plans: Sequence[WorkPlan]) -> None:
        """Wait until the device has read the last step from the host buffer, write this step there, and begin to copy it to the
        device."""
        self._device.wait_uploaded()
        inputs.write(arrays, work_plans)
        self._device.upload(self._host[: inputs.num_bytes], self._inputs[: inputs.num_bytes])

"""Decode steps as captured CUDA graphs: the host writes a step's inputs, copies them once, and replays a graph.

Every size of decode steps is captured at start-up (`decode_sizes`). A graph is trusted only after a replay over other inputs
has given what the forward pass gives over these inputs. If a capture or a check fails, all decode steps are launched kernel by
kernel.

Legend: B sequences of a size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from transom_kernels.paged_attention.work_items import WorkPlan
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.execution.graphs.decode_sizes import DecodeSize, DecodeSizes
from transom_worker.execution.graphs.graph_capture import CaptureDevice, Replayable
from transom_worker.execution.graphs.static_batch import (
    GroupLaunchKey,
    StaticBatch,
    buffer_bytes,
    plan_work_by_key,
    size_of,
)
from transom_worker.models.model import Model

# Accepted differences, as a share of the largest logit. Equal bits are expected, but cuBLAS promises them only on one stream and
# with one workspace, and graphs are captured on a stream of their own. A graph that reads a wrong input differs by far more.
# Quantised caches: a key at the edge of two stored numbers may fall to either side.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
QUANTISED_TOLERANCE = 5e-2

logger = logging.getLogger("transom.worker")


@dataclass(slots=True)
class _Captured:
    """One size's graph and the input arrays that it reads."""

    batch: StaticBatch
    graph: Replayable


class DecodeGraphs:
    """The graphs of one model's decode steps, by size."""

    def __init__(
        self,
        model: Model,
        builder: BatchBuilder,
        sizes: DecodeSizes,
        launch_keys: Sequence[GroupLaunchKey],
        device: CaptureDevice,
    ) -> None:
        """`launch_keys` are the launch keys of all attention layers, see `launches.launch_keys_of`."""
        self.builder, self.sizes = builder, sizes
        self._model, self._launch_keys, self._device = model, tuple(launch_keys), device
        self._tolerance = max(TOLERANCES.get(cache.k.dtype, QUANTISED_TOLERANCE) for cache in builder.caches)
        num_bytes = max(buffer_bytes(size, sizes, launch_keys, builder) for size in sizes.all)
        self._host = device.host_buffer(num_bytes)
        self._inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=builder.device)
        num_columns = model.vocab.stop - model.vocab.start
        # One tensor for all graphs, because a tensor for each of them would add up over all sizes.
        self._logits_BV = torch.zeros(sizes.num_seqs[-1], num_columns, dtype=torch.float32, device=builder.device)
        self._captured: dict[DecodeSize, _Captured] = {}

    @property
    def num_graphs(self) -> int:
        """How many graphs steps may replay."""
        return len(self._captured)

    def prepare(self, arrays: StepArrays) -> Callable[[], torch.Tensor] | None:
        """Copy a decode step's inputs to the device, and return the function that replays its graph.

        The function returns logits [sequences, V], which stay valid until the next step. If no graph fits the step, `prepare`
        does nothing and returns None.
        """
        if not arrays.only_decodes:
            return None
        work_plans = plan_work_by_key(arrays, self._launch_keys)
        size = self.sizes.smallest_for(size_of(arrays, work_plans))
        captured = None if size is None else self._captured.get(size)
        if captured is None:
            return None
        self._load(captured.batch, arrays, work_plans)
        return partial(self._replayed, captured.graph, len(arrays.token_ids))

    def capture(self, size: DecodeSize, first: StepArrays, second: StepArrays) -> None:
        """Capture one size over the first step, and check the graph over the second. Both steps run, and write into the cache.

        Raises:
            GraphMismatch: a replay over the second step gives other logits than its forward pass.  Any other error: the device
                cannot capture.
        """
        batch = StaticBatch(size, self.sizes, self._launch_keys, self.builder, host=self._host, device=self._inputs)
        self._load(batch, first, plan_work_by_key(first, self._launch_keys))

        def run() -> None:
            self._logits_BV[: size.num_seqs].copy_(self._model.forward(batch.forward_batch()))

        graph = self._device.capture(run)
        self._load(batch, second, plan_work_by_key(second, self._launch_keys))
        graph.replay()
        self._compare(size, self._logits_BV[: size.num_seqs], self._model.forward(batch.forward_batch()))
        self._captured[size] = _Captured(batch, graph)

    def _replayed(self, graph: Replayable, num_seqs: int) -> torch.Tensor:
        graph.replay()
        return self._logits_BV[:num_seqs]

    def _load(self, batch: StaticBatch, arrays: StepArrays, work_plans: Sequence[WorkPlan]) -> None:
        self._device.wait_uploaded()
        batch.write(arrays, work_plans)
        self._device.upload(self._host[: batch.num_bytes], self._inputs[: batch.num_bytes])

    def _compare(self, size: DecodeSize, replayed_BV: torch.Tensor, logits_BV: torch.Tensor) -> None:
        if torch.equal(replayed_BV, logits_BV):
            return
        # The tolerance is for finite logits; infinite ones must be equal.
        most = float(logits_BV.abs().nan_to_num(posinf=0.0).max())
        differs = float((replayed_BV - logits_BV).abs().nan_to_num(nan=most).max())
        if not torch.allclose(replayed_BV, logits_BV, rtol=0.0, atol=self._tolerance * most, equal_nan=True):
            raise GraphMismatch(
                f"{size}: logits of up to {most:.4g} differ by up to {differs:.4g} from the forward pass"
            )
        logger.info("The graph of %s differs by up to %.3g in logits of up to %.3g.", size, differs, most)


class GraphMismatch(Exception):
    """A graph does not compute what its forward pass computes; start-up catches this error and goes on without graphs."""

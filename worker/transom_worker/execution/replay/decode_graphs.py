"""Steps as captured CUDA graphs: the host writes a step's inputs, copies them once, and replays a graph.

Every size of decode steps and of mixed steps is captured at start-up (`decode_sizes`). A graph is used only if a replay over new
inputs gives the same logits as a forward pass over these inputs; `graph_warm_up` says what runs eagerly if one does not.

Legend: B sequences of a size, T tokens of a size, V vocabulary.
"""

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
from transom_worker.models.expanded_prompts import is_expanded, may_expand
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
    """The graphs of one model's steps, by size.

    At start, for each size: `warm_up`, `record`, `check`, and `drop` if a rank's graph is wrong (`first_wrong_layer` says where).
    Then, for each step: `prepare`, and the function that it returns, which replays a graph.
    """

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
        self._all_graphs: list[Replayable] = []  # wrong ones, too: all are freed together, see `CudaCapture`
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
        """See `DecodeReplay.prepare`. A step with KV policies always runs eagerly, and so does one with more logit rows than
        sequences, which prompt log-probabilities need."""
        is_mixed = not arrays.only_decodes
        if policy is not None or not self._captured or (is_mixed and not self._may_replay_mixed(arrays)):
            return None
        work_plans = plan_work_by_key(arrays, self._launch_keys, is_mixed=is_mixed)
        size = self.sizes.smallest_for(size_of(arrays, work_plans, self._launch_keys if is_mixed else None))
        captured = None if size is None else self._captured.get(size)
        if captured is None:
            return None
        self._load(captured.inputs, arrays, work_plans)
        self._prepared = captured.inputs
        return partial(self._replayed, captured.graph, len(arrays.logit_rows))

    def _may_replay_mixed(self, arrays: StepArrays) -> bool:
        """Return whether a mixed step may fit a size, so that it is worth planning. Graphs do not expand latent rows, and what a
        prompt gets must not depend on whether its step has a graph."""
        mla, rows = self._model.architecture.mla if may_expand(self._model.architecture) else None, arrays.rows
        if len(arrays.token_ids) > self.sizes.most_mixed_tokens or len(arrays.logit_rows) > len(rows.start_host):
            return False
        sequences = zip(rows.start_host, rows.count_host, strict=True)
        return mla is None or not any(is_expanded(mla, start, count) for start, count in sequences)

    def warm_up(self, size: DecodeSize, first: StepArrays) -> GraphInputs:
        """Run one size's step, which also compiles its kernels, and return its inputs for `record` and `check`."""
        inputs = GraphInputs(size, self.sizes, self._launch_keys, self.builder, host=self._host, device=self._inputs)
        self._load_planned(inputs, first)
        self._device.warm_up(partial(self._run, inputs, None))
        return inputs

    def record(self, inputs: GraphInputs, sums: torch.Tensor | None = None) -> Replayable:
        """Capture the step of `warm_up` without computing anything; with `sums`, those of `layer_sums`. Raises any error if the
        device cannot capture."""
        graph = self._device.capture(partial(self._run, inputs, sums))
        self._all_graphs.append(graph)
        return graph

    def check(self, size: DecodeSize, inputs: GraphInputs, graph: Replayable, second: StepArrays) -> None:
        """Replay a graph over a second step, and run its forward pass; keep the graph if they agree. Both write into the cache.

        Raises:
            ReplayMismatch: the replay gives other logits than the forward pass.
        """
        self._load_planned(inputs, second)
        replayed_BV, logits_BV = self._replayed(graph, size.num_seqs), self._model.forward(inputs.forward_batch())
        check_replay(str(size), replayed_BV, logits_BV, tolerance=self.tolerance)
        self._captured[size] = _Captured(inputs, graph)

    def layer_sums(self, size: DecodeSize) -> torch.Tensor:
        """Return memory for the sums over each layer's outputs, and over their absolute values, [2, layers, T]."""
        return torch.zeros(2, self._model.architecture.num_layers, size.num_tokens, device=self.builder.device)

    def first_wrong_layer(
        self, inputs: GraphInputs, graph: Replayable, sums: torch.Tensor, second: StepArrays
    ) -> int | None:
        """Return the first layer whose sums in a replay over a second step differ from those in its forward pass; None if none
        differ. `record` has captured the graph with `sums`."""
        self._load_planned(inputs, second)
        graph.replay()
        replayed = sums.clone()
        self._run(inputs, sums)
        differs = ~((replayed[0] - sums[0]).abs() <= self.tolerance * sums[1])  # NaN differs
        wrong = differs.any(-1).tolist()
        return wrong.index(True) if any(wrong) else None

    def drop(self, size: DecodeSize) -> None:
        """Run steps of a size eagerly, because its graph on this or another rank is wrong."""
        self._captured.pop(size, None)
        self.num_wrong += 1

    def _run(self, inputs: GraphInputs, sums: torch.Tensor | None) -> None:
        """Compute the logits of a step; with `sums`, the sums of `layer_sums` as well."""
        batch = inputs.forward_batch()
        if sums is not None:

            def note(layer: int, x_BN: torch.Tensor) -> None:
                # The last layer of a mixed step computes only rows that have logits.
                of_rows = sums[:, layer, : len(x_BN)]
                of_rows[0], of_rows[1] = x_BN.float().sum(-1), x_BN.float().abs().sum(-1)

            batch.after_layer = note
        logits_BV = self._model.forward(batch)
        self._logits_BV[: len(logits_BV)].copy_(logits_BV)

    def _replayed(self, graph: Replayable, num_rows: int) -> torch.Tensor:
        graph.replay()
        return self._logits_BV[:num_rows]

    def _load_planned(self, inputs: GraphInputs, arrays: StepArrays) -> None:
        """Plan the work items of a step that is captured or checked, and load it."""
        is_mixed = inputs.size.mixed_tokens > 0
        self._load(inputs, arrays, plan_work_by_key(arrays, self._launch_keys, is_mixed=is_mixed))

    def _load(self, inputs: GraphInputs, arrays: StepArrays, work_plans: Sequence[WorkPlan]) -> None:
        """Wait until the device has read the last step from the host buffer, write this step there, and begin to copy it to the
        device."""
        self._device.wait_uploaded()
        inputs.write(arrays, work_plans)
        self._device.upload(self._host[: inputs.num_bytes], self._inputs[: inputs.num_bytes])

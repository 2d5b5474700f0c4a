"""Runs the model's forward pass: replays a decode step that was captured (a CUDA graph) or recorded (a program, on CPUs), and
launches the kernels one by one otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from transom_core.config import EngineConfig
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_kernels.launch import uses_cpu_kernels, uses_triton
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.execution.graphs.decode_graphs import DecodeGraphs
from transom_worker.execution.graphs.decode_sizes import DecodeSizes
from transom_worker.execution.graphs.graph_capture import capture_device
from transom_worker.execution.graphs.graph_warm_up import capture_decode_graphs
from transom_worker.execution.policy_report import PolicyReport
from transom_worker.execution.programs.static_policy_inputs import PolicyVariant
from transom_worker.execution.step_logits import StepLogits, ready_logits
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.model import Model
from transom_worker.models.parallel import Parallel
from transom_worker.scheduling.step import StepPlan

if TYPE_CHECKING:
    from transom_worker.execution.programs.decode_programs import DecodePrograms

_CAPTURED_KINDS = (GroupKind.FULL, GroupKind.WINDOW, GroupKind.CHUNK, GroupKind.SINKS_WINDOW)


class ForwardPass:
    """Prepares forward passes over one slab, and counts the eager steps and the steps that were replayed from a graph."""

    def __init__(self, model: Model, builder: BatchBuilder) -> None:
        self._model, self._builder = model, builder
        self._graphs: DecodeGraphs | None = None
        self._programs: DecodePrograms | None = None
        self.policy_report: PolicyReport | None = (
            None  # of the last prepared step, if some of its rows have KV policies
        )
        self.num_eager_steps = 0  # steps whose kernels the host launched one by one
        self.num_graph_steps = 0  # steps that were replayed from a graph or a program

    @property
    def num_graphs(self) -> int:
        """How many CUDA graphs were captured, one for each size of decode steps."""
        return 0 if self._graphs is None else self._graphs.num_graphs

    def capture(self, sizes: DecodeSizes, slab: torch.Tensor) -> None:
        """Capture CUDA graphs of decode steps. If capturing fails, all steps stay eager."""
        device = capture_device(slab.device)
        if device is not None:
            self._graphs = capture_decode_graphs(self._model, self._builder, sizes, device, slab=slab)

    def record_programs(self, *, max_num_seqs: int, max_model_len: int) -> None:
        """From now on record decode steps as programs and replay them."""
        from transom_worker.execution.programs.decode_programs import DecodePrograms  # it needs the compiler for CPUs

        self._programs = DecodePrograms(
            self._model, self._builder, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )

    def prepare(self, plan: StepPlan, store: SequenceStore) -> Callable[[], StepLogits]:
        """Copy the inputs of a step to the device, and return the function that then runs it.

        Raises:
            ValueError: the plan contradicts what this rank knows of the sequences.
        """
        arrays = self._builder.arrays(plan, store)
        self.policy_report = None
        if arrays.has_policies:
            return self._prepare_policies(plan, arrays, store)
        replays = self._graphs or self._programs
        replay = None if replays is None else replays.prepare(arrays)
        if replay is not None:
            self.num_graph_steps += 1
            return partial(_replayed, plan, replay)
        self.num_eager_steps += 1
        return partial(self._run, plan, self._builder.batch(arrays))

    def _prepare_policies(self, plan: StepPlan, arrays: StepArrays, store: SequenceStore) -> Callable[[], StepLogits]:
        """As `prepare`, for a step some of whose rows have KV policies."""
        report = self.policy_report = PolicyReport(plan, arrays, store, self._builder)

        def eager_batch() -> ForwardBatch:
            batch = self._builder.batch(arrays)
            report.attach(batch)
            return batch

        replay = None
        if self._programs is not None:
            variant = PolicyVariant(report.wants_mass, self._builder.passes_trained_len(arrays))
            replay = self._programs.prepare_policies(arrays, variant, eager_batch)
            if replay is not None and report.wants_mass:
                report.take_mass(self._programs.policy_inputs.block_mass)
        if replay is None:
            self.num_eager_steps += 1
            compute = partial(self._run, plan, eager_batch())
        else:
            self.num_graph_steps += 1
            compute = partial(_replayed, plan, replay)

        def run() -> StepLogits:
            report.measure(self._model)
            return compute()

        return run

    def _run(self, plan: StepPlan, batch: ForwardBatch) -> StepLogits:
        """Run the model without a graph or a program."""
        if len(batch.logit_rows) == plan.sample.count(1):
            return ready_logits(plan, self._model.forward(batch))
        return StepLogits(plan, self._model.hidden(batch), self._model.logits)


def _replayed(plan: StepPlan, replay: Callable[[], torch.Tensor]) -> StepLogits:
    return ready_logits(plan, replay())


def records_programs(config: EngineConfig, groups: list[GroupSpec], slab: torch.Tensor) -> bool:
    """Whether decode steps are recorded: on CPUs with kernels, unless a group's rows of a step depend on positions."""
    recordable = all(spec.kind in _CAPTURED_KINDS for spec in groups)
    return recordable and not config.model.enforce_eager and uses_cpu_kernels(slab)


def decode_sizes(
    config: EngineConfig, parallel: Parallel, groups: list[GroupSpec], *, max_model_len: int, device: torch.device
) -> DecodeSizes | None:
    """Return the sizes of decode steps to capture as CUDA graphs, or None where decode steps are always launched.

    Several ranks always launch: on gloo their collectives go through the host, and on nccl each rank would have to capture, and
    give up, the same sizes as the others. Latent and compressed attention layers always launch: they choose what they read with
    the host's help.
    """
    if config.model.enforce_eager or parallel.size > 1 or capture_device(device) is None:
        return None
    if not uses_triton(torch.empty(0, device=device)) or any(spec.kind not in _CAPTURED_KINDS for spec in groups):
        return None
    scheduler = config.scheduler
    return DecodeSizes(
        groups,
        max_num_seqs=min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens),
        max_model_len=max_model_len,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
    )

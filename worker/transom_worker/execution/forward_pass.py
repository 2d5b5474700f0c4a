"""Runs a step's forward pass. A step of a recorded size is replayed (`replay`); every other step runs *eagerly*: the host
launches its kernels one by one.

    run = forward.prepare(plan, store)      copies the inputs to the device
    logits = run()                          runs or replays the model
"""

from collections.abc import Callable
from functools import partial

import torch

from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.device_queue import with_sampled
from transom_worker.execution.policy_report import PolicyReport
from transom_worker.execution.replay.decode_replay import DecodeReplay, PolicyVariant
from transom_worker.execution.step_sampling import StepLogits
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.model import Model
from transom_worker.scheduling.step import StepPlan


class ForwardPass:
    """Prepares forward passes over one slab, and counts the eager and the replayed steps.

    `policy_report` belongs to the step prepared last; None if none of its rows has a KV policy.
    """

    def __init__(self, model: Model, builder: BatchBuilder, replay: DecodeReplay | None = None) -> None:
        self._model, self._builder, self._replay = model, builder, replay
        self.policy_report: PolicyReport | None = None
        self.num_eager_steps = 0
        self.num_eager_decodes = 0  # the eager steps that only decode
        self.num_graph_steps = 0  # steps that were replayed from a CUDA graph or a program
        self.num_graph_decodes = 0  # the replayed steps that only decode

    @property
    def num_graphs(self) -> int:
        """Return the number of captured CUDA graphs, one for each size of decode steps and mixed steps."""
        return 0 if self._replay is None else self._replay.num_graphs

    @property
    def num_wrong_graphs(self) -> int:
        """Return the number of sizes of steps whose graph was discarded, because its results differed from an eager pass."""
        return 0 if self._replay is None else self._replay.num_wrong

    def prepare(
        self, plan: StepPlan, store: SequenceStore, sampled_S: torch.Tensor | None = None
    ) -> Callable[[], StepLogits]:
        """Copy the inputs of a step to the device, and return the function that then runs it.

        `sampled_S` are the last step's ids on the device, given if the host does not know the input tokens of some rows yet.

        Raises:
            ValueError: the plan contradicts what this rank knows of the sequences.
        """
        arrays = self._builder.arrays(plan, store)
        report = PolicyReport(plan, arrays, store, self._builder) if arrays.has_policies else None
        self.policy_report = report

        def eager_batch() -> ForwardBatch:
            batch = self._builder.batch(arrays)
            if sampled_S is not None:
                batch.token_ids = with_sampled(batch.token_ids, sampled_S, arrays.token_ids)
            if report is not None:
                report.attach(batch)
            return batch

        # A decode step with policy rows has recordings of its own, for each combination of these two facts.
        policy = None
        if report is not None:
            policy = PolicyVariant(report.wants_mass, self._builder.passes_trained_len(arrays))
        replay = None
        if self._replay is not None and not plan.keeps_hidden:  # a recorded step computes logits alone
            replay = self._replay.prepare(arrays, policy, eager_batch)
        if replay is None:
            self.num_eager_steps += 1
            self.num_eager_decodes += arrays.only_decodes
            run = partial(self._run, plan, eager_batch())
        else:
            self.num_graph_steps += 1
            self.num_graph_decodes += arrays.only_decodes
            if sampled_S is not None and self._replay is not None:
                token_ids = self._replay.token_ids[: len(arrays.token_ids)]  # without padding
                token_ids.copy_(with_sampled(token_ids, sampled_S, arrays.token_ids))
            run = partial(_replayed, plan, replay)
        if report is None:
            return run
        # An eager batch had the report attached when it was built; a replay adds up mass in a tensor of its own.
        if replay is not None and self._replay is not None and report.wants_mass:
            report.take_mass(self._replay.block_mass)
        return partial(self._measured, report, run)

    def _measured(self, report: PolicyReport, run: Callable[[], StepLogits]) -> StepLogits:
        """Run the pass that measures rows, and then the step's own pass."""
        report.measure(self._model)
        return run()

    def _run(self, plan: StepPlan, batch: ForwardBatch) -> StepLogits:
        """Run the model eagerly. Logits that are not for sampling are for prompt log-probabilities, and are computed later."""
        if len(batch.logit_rows) == plan.sample.count(1) and not plan.keeps_hidden:
            return StepLogits(plan, self._model.forward(batch))
        return StepLogits(plan, self._model.hidden(batch), self._model.logits, self._model.scores)


def _replayed(plan: StepPlan, replay: Callable[[], torch.Tensor]) -> StepLogits:
    return StepLogits(plan, replay())

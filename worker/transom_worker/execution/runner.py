"""Executes scheduler plans on one rank: turns each `StepPlan` into a `StepResult`. `setup.model_setup` makes the runner.

    execute(plan)    update sequences and block tables -> copy blocks -> forward pass -> sample -> report loads that have ended
    abandon(plan)    for a plan that failed or was dropped: only what later plans count on

- rank: one of the processes that share a model by tensor parallelism; a worker with one rank runs it in the engine's process.
- plan (`StepPlan`): what the scheduler wants computed in one step: which tokens of which sequences, and which cache blocks to
  change.
- tiers: this rank's KV memory on the device, the host and the disk (`tiers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from transom_core.errors import OutOfMemory, StepFailed, TransomError
from transom_core.model_config.architecture import Architecture
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.executor import ExecutorInfo, RankUsage
from transom_worker.execution.forward_pass import ForwardPass
from transom_worker.execution.memory import process_memory_bytes
from transom_worker.execution.out_of_memory import free_cached_memory, is_out_of_memory, release_tensors
from transom_worker.execution.step_clock import Mark, step_clock
from transom_worker.execution.step_sampling import sample_step
from transom_worker.execution.tiers.rank_tiers import RankTiers
from transom_worker.models.parallel import Parallel
from transom_worker.sampling.sharded import ShardedSampler
from transom_worker.scheduling.step import NO_ID, STEP_VERSION, StepPlan, StepResult, StepTimings


class ModelRunner:
    """Executes plans in order on one device.

    `info` has the cache plan and the limits of the model, for the engine. `was_committed` says of the last plan that failed
    whether it had begun what it cannot leave half done: block copies, or the forward pass, in which ranks wait for each other.
    """

    def __init__(
        self,
        architecture: Architecture,
        parallel: Parallel,
        *,
        info: ExecutorInfo,
        tiers: RankTiers,
        builder: BatchBuilder,
        forward: ForwardPass,
        sampler: ShardedSampler,
        max_num_seqs: int,
    ) -> None:
        self._architecture, self._parallel, self._device = architecture, parallel, builder.device
        self.info, self.tiers = info, tiers
        self._builder, self._forward, self._sampler = builder, forward, sampler
        self._store = SequenceStore([group.spec for group in builder.layout.groups], max_num_seqs=max_num_seqs)
        self._previous_sampled: dict[int, int] = {}  # batch row of the last step -> the token that it sampled
        self._clock = step_clock(self._device)
        self.was_committed = False
        self._forward_s = 0.0  # seconds in forward passes since the start
        self._busy_s = 0.0  # seconds in steps since the start

    @property
    def usage(self) -> RankUsage:
        """The time and memory that this rank has used since it started."""
        weights_and_kv = self.info.memory.weight_bytes + self.info.memory.kv_bytes
        return RankUsage(
            forward_s=self._forward_s,
            busy_s=self._busy_s,
            num_eager_steps=self._forward.num_eager_steps,
            num_eager_decodes=self._forward.num_eager_decodes,
            num_graph_steps=self._forward.num_graph_steps,
            disk=self.tiers.disk_usage,
            other_bytes=max(0, process_memory_bytes(self._device) - weights_and_kv),
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute one plan: update the sequences, copy blocks, run the forward pass, and sample.

        With several ranks, only the result of rank 0 contains log-probabilities.

        Raises:
            OutOfMemory: the step needed more memory than there is. Its tensors are freed; it may have done any part of the plan.
            StepFailed: the plan has another version.  ValueError: the plan contradicts what this rank knows of its sequences.
        """
        self.was_committed = False
        try:
            return self._execute(plan)
        except Exception as error:
            if isinstance(error, TransomError) or not is_out_of_memory(error):
                raise
            reason = release_tensors(error)
        # Not in the handler, which would keep the error, and with it the frames of the step.
        free_cached_memory(self._device)
        raise OutOfMemory(f"Step {plan.step_id} ran out of memory: {reason}")

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepResult:
        if plan.version != STEP_VERSION:
            raise StepFailed(
                f"The plan has version {plan.version}; this rank speaks {STEP_VERSION}. Update the older side."
            )
        clock = self._clock
        clock.begin()
        self._apply(plan)
        clock.mark(Mark.APPLIED)
        with self._committed():  # if copies fail, nothing says what the tiers contain
            num_copies = self.tiers.run(plan)
        clock.mark(Mark.COPIED)
        result = StepResult(step_id=plan.step_id, num_copies_done=num_copies)
        if plan.seq_ids:
            self._compute(plan, result)
        else:
            result.timings = StepTimings(copy_s=clock.copy_s)
        self._busy_s += clock.busy_s
        with self._committed():
            ended = self.tiers.ended_loads(wait=not plan.seq_ids)
        result.loaded, result.load_s, result.failed = ended.loaded, ended.load_s, ended.failed
        return result

    def _compute(self, plan: StepPlan, result: StepResult) -> None:
        """Run the forward pass of a plan with rows, sample, and write tokens, reports and timings into the result."""
        clock = self._clock
        forward = self._forward.prepare(plan, self._store)
        clock.mark(Mark.PREPARED)
        with self._committed():
            logits = forward()
            clock.mark(Mark.FORWARDED)
            if self._forward.policy_report is not None:
                self._forward.policy_report.fill(
                    logits,
                    result,
                    architecture=self._architecture,
                    parallel=self._parallel,
                    sampler=self._sampler,
                )
            self._previous_sampled = sample_step(plan, logits, result, sampler=self._sampler, store=self._store)
            clock.mark(Mark.SAMPLED)
            result.timings = clock.timings()
            self._forward_s += result.timings.forward_s

    @contextmanager
    def _committed(self) -> Iterator[None]:
        """Note an error within this context as one after which this rank and the others may have done different things."""
        try:
            yield
        except BaseException:
            self.was_committed = True
            raise

    def abandon(self, plan: StepPlan) -> None:
        """Remove the sequences that a plan declares finished, and make its copies, which later plans count on; nothing else."""
        for seq_id in plan.finished:
            self._remove_sequence(seq_id)
        with torch.inference_mode():
            self.tiers.run(plan)

    def close(self) -> None:
        """End the threads that copy blocks; idempotent."""
        self.tiers.close()

    def _apply(self, plan: StepPlan) -> None:
        """Bring the sequences up to date: remove finished ones, add new ones, update block tables, and append input tokens."""
        for seq_id in plan.finished:
            self._remove_sequence(seq_id)
        for new in plan.new_sequences:
            self._store.add(new)
            self._sampler.add(
                new.seq_id,
                token_ids=new.token_ids,
                num_prompt_tokens=new.num_prompt_tokens,
                params=new.params,
                seed=new.seed,
                choice_index=new.choice_index,
            )
        self._store.update_tables(plan)
        for b, seq_id in enumerate(plan.seq_ids):
            token_id = self._input_token(plan, b)
            if token_id is not None and self._store[seq_id].append_token(plan.start[b] + plan.count[b] - 1, token_id):
                self._sampler.append(seq_id, token_id)

    def _input_token(self, plan: StepPlan, b: int) -> int | None:
        """The input token of batch row `b`; None where the plan names none, because the sequence's tokens are all known
        already.

        With two steps in flight, the scheduler plans a decode step before the previous step has sampled its input token. The
        plan then names the previous step's batch row (`input_row`) instead of the token (`input_id`).
        """
        row = plan.input_row[b]
        if row == NO_ID:
            return None if plan.input_id[b] == NO_ID else plan.input_id[b]
        if row not in self._previous_sampled:
            raise ValueError(
                f"Batch row {b} takes its input from row {row} of the previous step, which sampled no token."
            )
        return self._previous_sampled[row]

    def _remove_sequence(self, seq_id: int) -> None:
        self._store.remove(seq_id)
        self._sampler.remove(seq_id)

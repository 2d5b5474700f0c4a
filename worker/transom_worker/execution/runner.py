"""Executes scheduler plans on one rank: turns each `StepPlan` into a `StepResult`. `setup.model_setup` makes the runner.

    launch(plan)     update sequences and block tables -> copy blocks -> forward pass -> sample
    finish(step)     wait for the sampled ids -> report loads that have ended
    execute(plan)    launch and finish
    abandon(plan)    for a plan that failed or was dropped: do only what later plans rely on

- rank: one of the processes that share a model by tensor parallelism; a worker with one rank runs it in the engine's process.
- plan (`StepPlan`): what the scheduler wants computed in one step: which tokens of which sequences, and which cache blocks to
  change.
- runs ahead: on a GPU, the host launches a plan before the last one has ended (`device_queue`), so that the GPU never waits.
- tiers: this rank's KV memory on the device, the host and the disk (`tiers`).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress, cycle
from typing import TypeVar

import numpy as np
import torch

from transom_core.errors import OutOfMemory, StepFailed, TransomError
from transom_core.model_config.architecture import Architecture
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.device_queue import DeviceQueue, in_row
from transom_worker.execution.executor import ExecutorInfo, RankUsage
from transom_worker.execution.forward_pass import ForwardPass
from transom_worker.execution.loss_causes import free_cached_memory, is_out_of_memory, release_tensors
from transom_worker.execution.memory import process_memory_bytes
from transom_worker.execution.step_clock import Mark, StepClock, step_clock
from transom_worker.execution.step_sampling import SampledIds, sample_step
from transom_worker.execution.tiers.rank_tiers import RankTiers
from transom_worker.models.parallel.communicator import Parallel
from transom_worker.sampling.sharded import ShardedSampler
from transom_worker.scheduling.step import NO_ID, STEP_VERSION, NewSequence, StepPlan, StepResult, StepTimings

T = TypeVar("T")


@dataclass(slots=True)
class LaunchedStep:
    """A plan that was launched and is not finished. `result` is filled as its parts become known; `sampled` are the tokens that the
    step samples, None if it has no rows."""

    plan: StepPlan
    result: StepResult
    clock: StepClock
    sampled: SampledIds | None = None

    @property
    def is_done(self) -> bool:
        """Return whether `ModelRunner.finish` would not wait for the device."""
        return self.sampled is None or self.sampled.is_ready()


class ModelRunner:
    """Executes plans in order on one device.

    `info` has the cache plan and the limits of the model, for the engine. `was_committed` says whether the last plan that failed
    had begun something that must not stay half done: block copies, or the forward pass, in which ranks wait for each other.
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
        queue: DeviceQueue,
        max_num_seqs: int,
        load_adapter: Callable[[int, str], None],
    ) -> None:
        """`load_adapter` is `Model.load_adapter`."""
        self._architecture, self._parallel, self._device = architecture, parallel, builder.device
        self.info, self.tiers = info, tiers
        self._builder, self._forward, self._sampler = builder, forward, sampler
        self._store = SequenceStore([group.spec for group in builder.layout.groups], max_num_seqs=max_num_seqs)
        self._queue, self._load_adapter = queue, load_adapter
        self._last_sampled = SampledIds(np.empty(0, dtype=np.int64), None, [])  # the ids of the last step with rows
        self._reading_seqs: set[int] = set()  # sequences that need their tokens on the host, see `_needs_tokens`
        self._waiting_seqs: set[int] = set()  # sequences whose steps make the host wait, see `_waits`
        self._clocks = cycle((step_clock(self._device), step_clock(self._device)))
        self.was_committed = False
        self._forward_s = 0.0  # seconds in forward passes since the start
        self._busy_s = 0.0  # seconds in steps since the start
        self._finished_s = 0.0  # when the last step ended

    @property
    def usage(self) -> RankUsage:
        """Return the time and memory that this rank has used since it started."""
        weights_and_kv = self.info.memory.weight_bytes + self.info.memory.kv_bytes
        return RankUsage(
            forward_s=self._forward_s,
            busy_s=self._busy_s,
            num_eager_steps=self._forward.num_eager_steps,
            num_eager_decodes=self._forward.num_eager_decodes,
            num_graph_steps=self._forward.num_graph_steps,
            num_graph_decodes=self._forward.num_graph_decodes,
            num_wrong_graphs=self._forward.num_wrong_graphs,
            disk=self.tiers.disk_usage,
            other_bytes=max(0, process_memory_bytes(self._device) - weights_and_kv),
        )

    @property
    def runs_ahead(self) -> bool:
        """Return whether a plan may be launched before the last one has ended."""
        return self._queue.runs_ahead

    def waits_in_launch(self, plan: StepPlan) -> bool:
        """Return whether `launch` of this plan will wait for the device, for tokens of the last step or numbers of this one."""
        has_waiting = not self._waiting_seqs.isdisjoint(plan.seq_ids) or any(_waits(new) for new in plan.new_sequences)
        return has_waiting or self._needs_tokens(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch one plan and wait for its result; for errors see `launch` and `finish`."""
        return self.finish(self.launch(plan))

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begin one plan: update the sequences, copy blocks, launch the forward pass and sampling.

        With several ranks, only the result of rank 0 contains log-probabilities. At most one launched step may be unfinished.

        Raises:
            OutOfMemory: the step needed more memory than there is. Its tensors are freed; it may have done any part of the plan.
            StepFailed: the plan has another version.  ValueError: the plan contradicts what this rank knows of its sequences.
        """
        self.was_committed = False
        return self._guarded(plan, lambda: self._launch(plan))

    def finish(self, step: LaunchedStep) -> StepResult:
        """Wait for the oldest unfinished step, and return its result. Raises OutOfMemory."""
        return self._guarded(step.plan, lambda: self._finish(step))

    def _guarded(self, plan: StepPlan, run: Callable[[], T]) -> T:
        try:
            return run()
        except Exception as error:
            if isinstance(error, TransomError) or not is_out_of_memory(error):
                raise
            reason = release_tensors(error)
        # Outside the handler, which would keep the error and, with it, the frames and tensors of the step.
        free_cached_memory(self._device)
        raise OutOfMemory(f"Step {plan.step_id} ran out of memory: {reason}")

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> LaunchedStep:
        if plan.version != STEP_VERSION:
            raise StepFailed(
                f"The plan has version {plan.version}; this rank reads version {STEP_VERSION}. Update the older side."
            )
        if self._needs_tokens(plan):
            self._last_sampled.wait()
        clock = next(self._clocks)
        step = LaunchedStep(plan, StepResult(step_id=plan.step_id), clock)
        clock.begin()
        self._apply(plan)
        clock.mark(Mark.APPLIED)
        with self._committed():  # if copies fail, the contents of the tiers are unknown
            self.tiers.run(plan)
        clock.mark(Mark.COPIED)
        if plan.seq_ids:
            self._compute(step)
        return step

    def _compute(self, step: LaunchedStep) -> None:
        """Launch the forward pass and the sampling of a plan that has rows."""
        plan, result, clock = step.plan, step.result, step.clock
        ids_S = None if self._last_sampled.known is not None else self._last_sampled.ids_S
        forward = self._forward.prepare(plan, self._store, ids_S)
        clock.mark(Mark.PREPARED)
        with self._committed():
            logits = forward()
            clock.mark(Mark.FORWARDED)
            if self._forward.policy_report is not None:
                self._forward.policy_report.fill(
                    logits, result, architecture=self._architecture, parallel=self._parallel, sampler=self._sampler
                )
            step.sampled = self._last_sampled = sample_step(
                plan, logits, result, sampler=self._sampler, store=self._store, queue=self._queue
            )
            clock.mark(Mark.SAMPLED)
            self._parallel.comm.end_step()

    @torch.inference_mode()
    def _finish(self, step: LaunchedStep) -> StepResult:
        plan, result, clock = step.plan, step.result, step.clock
        if step.sampled is None:
            result.timings = StepTimings(copy_s=clock.copy_s)
        else:
            with self._committed():
                result.sampled_ids = step.sampled.wait()
                self._parallel.comm.check()
            result.timings = clock.timings()
            self._forward_s += result.timings.forward_s
        now_s = time.perf_counter()
        # Steps overlap, and the time until the end of the last step is counted already.
        self._busy_s += now_s - max(clock.begin_s, self._finished_s)
        self._finished_s = now_s
        with self._committed():
            ended = self.tiers.ended_loads(wait=not plan.seq_ids)
        result.loaded, result.load_s, result.failed = ended.loaded, ended.load_s, ended.failed
        return result

    def _needs_tokens(self, plan: StepPlan) -> bool:
        """Return whether a step needs the last step's tokens on the host before it is launched. It does if the penalties of a row
        count these tokens, or if a row's sequence has a KV policy."""
        if self._last_sampled.known is not None or self._reading_seqs.isdisjoint(plan.seq_ids):
            return False
        rows = zip(plan.input_row, plan.seq_ids, strict=True)
        return any(row != NO_ID and seq_id in self._reading_seqs for row, seq_id in rows)

    @contextmanager
    def _committed(self) -> Iterator[None]:
        """Set `was_committed` if this context raises an error: this rank and the others may then have done different things."""
        try:
            yield
        except BaseException:
            self.was_committed = True
            raise

    @torch.inference_mode()
    def load_adapter(self, slot: int, path: str) -> None:
        """Copy a LoRA adapter into a slot, after the launched steps. Raises RequestError."""
        self._load_adapter(slot, path)

    def abandon(self, plan: StepPlan) -> None:
        """Remove the sequences that a plan declares finished, and make its block copies, since later plans rely on both; do nothing
        else."""
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
            if _waits(new):
                self._waiting_seqs.add(new.seq_id)
            self._sampler.add(
                new.seq_id,
                token_ids=new.token_ids,
                num_prompt_tokens=new.num_prompt_tokens,
                params=new.params,
                seed=new.seed,
                choice_index=new.choice_index,
            )
            if new.kv_policy is not None or self._sampler.needs_tokens(new.seq_id):
                self._reading_seqs.add(new.seq_id)
        self._store.update_tables(plan)
        self._append_inputs(plan)

    def _append_inputs(self, plan: StepPlan) -> None:
        """Append the input tokens of the plan's rows to their sequences, except to those that have all their tokens already.

        With two steps in flight, the scheduler plans a decode step before the previous step has sampled its input tokens. The
        plan then names the previous step's batch rows (`input_row`) instead of the tokens (`input_id`), and the tokens may still be
        on the device.
        """
        ids_B, row_B = np.array([plan.input_id, plan.input_row], dtype=np.int64)
        from_step_B, sampled = row_B != NO_ID, self._last_sampled
        index_B = np.append(sampled.row_B, NO_ID)[np.minimum(row_B, len(sampled.row_B))]
        if (wrong := np.flatnonzero(from_step_B & (index_B == NO_ID))).size:
            raise ValueError(
                f"Batch row {wrong[0]} takes its input from row {row_B[wrong[0]]} of the previous step, which sampled no token."
            )
        index_S = index_B[from_step_B]
        ids_B[from_step_B] = in_row(index_S) if sampled.known is None else np.array(sampled.known)[index_S]
        is_new_B = from_step_B | (ids_B != NO_ID)
        seq_ids = plan.seq_ids if is_new_B.all() else list(compress(plan.seq_ids, is_new_B.tolist()))
        positions_B = np.array(plan.start, dtype=np.int64) + np.array(plan.count, dtype=np.int64) - 1
        self._store.append(seq_ids, positions_B[is_new_B], ids_B[is_new_B])
        self._sampler.append(seq_ids, ids_B[is_new_B].tolist())

    def _remove_sequence(self, seq_id: int) -> None:
        self._waiting_seqs.discard(seq_id)
        self._reading_seqs.discard(seq_id)
        self._store.remove(seq_id)
        self._sampler.remove(seq_id)


def _waits(new: NewSequence) -> bool:
    """Return whether a sequence's steps read numbers from the device before they end: log-probabilities, hidden states, or
    attention's mass."""
    params = new.params
    reads_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
    return reads_logprobs or params.pooling is not None or new.kv_policy is not None

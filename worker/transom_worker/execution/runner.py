"""Runs scheduler plans on one rank: loads this rank's part of the model, owns its KV pool, and turns each `StepPlan` into a
`StepResult`.

- rank: one of the processes that share a model by tensor parallelism; a worker with one rank runs it in the engine's process.
- plan (`StepPlan`): what the scheduler wants computed in one step: which tokens of which sequences, and which cache blocks to
  change.
- slab: the one allocation of memory that holds this rank's whole KV pool; `ArenaLayout` says where each block lies in it.
- group: layers whose caches share block tables, because they keep the same tokens (all of them, a window, a chunk).

Legend: B scheduled sequences, R rows with logits, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from transom_core.config import EngineConfig
from transom_core.contract import SamplingParams
from transom_core.errors import ConfigError, OutOfMemory, StepFailed, TransomError
from transom_core.kv_cache.kv_shares import KvShares
from transom_core.kv_cache.layout import ArenaLayout, GroupLayout
from transom_core.machine.host_memory import available_host_bytes
from transom_core.model_config.architecture import choose_max_model_len
from transom_core.model_config.kv_policy_obstacle import kv_policy_obstacle
from transom_core.model_config.sharding import head_share
from transom_kernels.launch import compile_seconds, kernels_on, uses_cpu_kernels
from transom_worker.execution import memory
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.batch.slab import allocate_slab
from transom_worker.execution.dummy_run import warm_up, worst_case_counts, worst_case_start, worst_case_step
from transom_worker.execution.executor import ExecutorInfo, MemoryReport, RankUsage
from transom_worker.execution.forward_pass import ForwardPass, decode_sizes, records_programs
from transom_worker.execution.graphs.graph_memory import graph_bytes
from transom_worker.execution.load_progress import OnProgress
from transom_worker.execution.model_loading import ONE_RANK, LoadedModel, load_model, set_threads
from transom_worker.execution.out_of_memory import free_cached_memory, is_out_of_memory, release_tensors
from transom_worker.execution.programs.recorded_collectives import with_recorded_collectives
from transom_worker.execution.step_clock import Mark, step_clock
from transom_worker.execution.step_sampling import sample_step
from transom_worker.execution.tiers.block_copies import BlockCopies, TierMemory
from transom_worker.execution.tiers.host_slab import allocate_host_slab
from transom_worker.kvcache.tiers.disk.block_file import HEADER_BYTES
from transom_worker.kvcache.tiers.disk.fingerprint import fingerprint
from transom_worker.kvcache.tiers.disk.folder import BlockFolder
from transom_worker.models.parallel import Parallel
from transom_worker.planner import (
    CachePlan,
    cache_groups,
    check_runs,
    make_layout,
    plan_cache,
    rank_layout,
    with_rank_shares,
)
from transom_worker.sampling.sharded import ShardedSampler
from transom_worker.scheduling.step import (
    NO_ID,
    STEP_VERSION,
    TIER_DEVICE,
    TIER_HOST,
    StepPlan,
    StepResult,
    StepTimings,
)

WARM_UP_SAMPLING = SamplingParams(repetition_penalty=1.1, logprobs=1)  # so that the kernels for these are compiled, too

logger = logging.getLogger("transom.worker")


class ModelRunner:
    """Executes plans in order on one device.

    A runner is set up in three calls. The constructor loads the model; `pool_bytes` says how large a KV pool then fits into
    memory; and `allocate` makes the pool, at the size that fits every rank. With several ranks, each rank makes the three calls
    at the same time as the others, because the forward passes in them contain collectives.
    """

    def __init__(
        self,
        config: EngineConfig,
        parallel: Parallel = ONE_RANK,
        loaded: LoadedModel | None = None,
        *,
        ranks_on_host: int = 1,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Load the model, or take over `loaded` in its place. `ranks_on_host` ranks share this host's cores and memory.

        Raises:
            ConfigError: the model cannot meet the settings.  ModelError: the model cannot be loaded.
        """
        set_threads(config.num_threads, ranks_on_host=ranks_on_host)
        parallel = with_recorded_collectives(parallel)
        self._config, self._parallel, self._ranks_on_host = config, parallel, ranks_on_host
        self._loaded = loaded or load_model(config.model, parallel, on_progress)
        self._model = self._loaded.model
        self._max_model_len = choose_max_model_len(config.model.max_model_len, self._loaded.architecture)
        layouts = self._groups_of(parallel.rank)
        check_runs(layouts, self._loaded.dtype)
        groups = [group.spec for group in layouts]
        self._decode_sizes = decode_sizes(
            config, parallel, groups, max_model_len=self._max_model_len, device=self._loaded.device
        )
        self._clock = step_clock(self._loaded.device)
        # Whether the last step began what it cannot leave half done: block copies, or the forward pass, in which ranks wait for
        # each other.
        self.is_committed = False
        self._forward_s = 0.0  # seconds in forward passes since the start
        self._busy_s = 0.0  # seconds in steps since the start

    def pool_bytes(self) -> int:
        """Return how many bytes of KV pool fit into this rank's memory.

        Raises:
            ConfigError: no memory is left for a pool.
        """
        groups, scheduler = self._groups_of(self._parallel.rank), self._config.scheduler
        small = make_layout(groups, 8 * len(groups) * max(group.stride_bytes for group in groups))
        return memory.pool_bytes(
            self._config.cache,
            device=self._loaded.device,
            max_useful_bytes=memory.max_useful_bytes(groups, scheduler, self._max_model_len),
            ranks_on_host=self._ranks_on_host,
            run_worst_case=lambda: self._forward_probe(small),
            graph_bytes=graph_bytes(self._decode_sizes, self._loaded.architecture, scheduler, self._loaded.dtype),
        )

    def allocate(self, pool_bytes: int) -> ExecutorInfo:
        """Plan the cache for a pool that fits every rank, allocate this rank's part of it, and warm up.

        Raises:
            ConfigError: the pool is too small for the model, or larger than the memory.
        """
        self._plan = self._plan_cache(pool_bytes)
        self._layout = rank_layout(self._plan.layout, self._groups_of(self._parallel.rank))
        self._groups = tuple(group.spec for group in self._layout.groups)
        self._slab = self._allocate_slab()
        self._copies = self._make_copies()
        self._builder = self._make_builder(self._layout, self._slab)
        self._forward = ForwardPass(self._model, self._builder)
        self._store = SequenceStore(self._groups, max_num_seqs=self._config.scheduler.max_num_seqs)
        self._sampler = ShardedSampler(
            self._parallel, first_id=self._model.vocab.start, eos_token_ids=self._loaded.eos_token_ids
        )
        self._previous_sampled: dict[int, int] = {}
        self._warm_up()
        return self.info

    @property
    def info(self) -> ExecutorInfo:
        """The cache plan and the limits of the model, for the engine."""
        architecture, kernels = self._loaded.architecture, kernels_on(self._loaded.device)
        return ExecutorInfo(
            plan=self._plan,
            max_model_len=self._max_model_len,
            vocab_size=architecture.vocab_size,
            eos_token_ids=self._loaded.eos_token_ids,
            memory=self.memory_report,
            dtype=self._loaded.dtype,
            kernels=kernels,
            compile_s=compile_seconds() if kernels == "cpu" else 0.0,
            kv_policy_obstacle=kv_policy_obstacle(architecture),
            num_graphs=self._forward.num_graphs,
            disk_fingerprint=self._disk_fingerprint(0) if self._config.cache.disk_cache else b"",
            shares=self._shares(),
        )

    @property
    def memory_report(self) -> MemoryReport:
        """How many bytes of this rank's memory hold weights, activations and the KV pool."""
        dtype: torch.dtype = getattr(torch, self._loaded.dtype)
        return MemoryReport(
            device=str(self._loaded.device),
            weight_bytes=self._model.weight_bytes,
            activation_bytes=memory.activation_bytes(self._loaded.architecture, self._config.scheduler, dtype),
            kv_bytes=self._layout.slab_bytes,
        )

    @property
    def usage(self) -> RankUsage:
        """The time and memory that this rank has used since it started."""
        weights_and_kv = self._model.weight_bytes + self._layout.slab_bytes
        return RankUsage(
            forward_s=self._forward_s,
            busy_s=self._busy_s,
            num_eager_steps=self._forward.num_eager_steps,
            num_graph_steps=self._forward.num_graph_steps,
            disk=self._copies.disk_usage,
            other_bytes=max(0, memory.process_memory_bytes(self._loaded.device) - weights_and_kv),
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute one plan: update the sequences, copy blocks, run the forward pass, and sample.

        With several ranks, only the result of rank 0 contains log-probabilities.

        Raises:
            OutOfMemory: the step needed more memory than there is. Its tensors are freed; it may have done any part of the plan.
            StepFailed: the plan has another version.  ValueError: the plan contradicts what this rank knows of its sequences.
        """
        try:
            return self._execute(plan)
        except Exception as error:
            if isinstance(error, TransomError) or not is_out_of_memory(error):
                raise
            reason = release_tensors(error)
        # Behind the handler, which would keep the error, and with it the frames of the step.
        free_cached_memory(self._loaded.device)
        raise OutOfMemory(f"Step {plan.step_id} ran out of memory: {reason}")

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepResult:
        self.is_committed = False
        if plan.version != STEP_VERSION:
            raise StepFailed(
                f"The plan has version {plan.version}; this rank speaks {STEP_VERSION}. Update the older side."
            )
        clock = self._clock
        clock.begin()
        self._apply(plan)
        clock.mark(Mark.APPLIED)
        num_copies = self._run_copies(plan)
        clock.mark(Mark.COPIED)
        result = StepResult(step_id=plan.step_id, num_copies_done=num_copies)
        if plan.seq_ids:
            forward = self._forward.prepare(plan, self._store)
            clock.mark(Mark.PREPARED)
            self.is_committed = True
            logits = forward()
            clock.mark(Mark.FORWARDED)
            report = self._forward.policy_report
            if report is not None:
                report.fill(
                    logits,
                    result,
                    architecture=self._loaded.architecture,
                    parallel=self._parallel,
                    sampler=self._sampler,
                )
            self._previous_sampled = sample_step(plan, logits, result, sampler=self._sampler, store=self._store)
            clock.mark(Mark.SAMPLED)
            result.timings = clock.timings()
            self._forward_s += result.timings.forward_s
        else:
            result.timings = StepTimings(copy_s=clock.copy_s)
        self._busy_s += clock.busy_s
        self._report_loads(plan, result)
        return result

    def _run_copies(self, plan: StepPlan) -> int:
        """Make the plan's copies. The rank cannot go on where that fails, since nothing says what the tiers then contain."""
        self.is_committed = True
        num_copies = self._copies.run(plan)
        self.is_committed = False
        return num_copies

    def _report_loads(self, plan: StepPlan, result: StepResult) -> None:
        """Add the loads that have ended to a result. A step without rows waits a moment for one."""
        self.is_committed = True
        ended = self._copies.ended_loads(wait=not plan.seq_ids)
        self.is_committed = False
        result.loaded, result.load_s, result.failed = ended.loaded, ended.load_s, ended.failed

    def abandon(self, plan: StepPlan) -> None:
        """Remove the sequences that a plan declares finished, and make its copies, which later plans count on; nothing else."""
        for seq_id in plan.finished:
            self._remove_sequence(seq_id)
        with torch.inference_mode():
            self._run_copies(plan)

    @torch.inference_mode()
    def read_blocks(self, tier: int, group: int, blocks: Sequence[int]) -> bytes:
        """Return the contents of blocks, as `BlockCopies.read` does."""
        return self._copies.read(tier, group, blocks)

    @torch.inference_mode()
    def write_blocks(self, tier: int, group: int, blocks: Sequence[int], data: bytes) -> None:
        """Write the contents of blocks, as `BlockCopies.write` does."""
        self._copies.write(tier, group, blocks, data)

    def close(self) -> None:
        """End the threads that copy blocks; idempotent."""
        self._copies.close()

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
        plan then names the previous step's batch row (`input_row`) in place of the token (`input_id`).
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

    def _groups_of(self, rank: int) -> tuple[GroupLayout, ...]:
        return cache_groups(
            self._loaded.architecture,
            block_size=self._config.cache.block_size,
            dtype=self._loaded.dtype,
            kv_cache_dtype=self._config.cache.kv_cache_dtype,
            tensor_parallel_size=self._parallel.size,
            rank=rank,
            hybrid=self._config.model.hybrid_kv_cache,
        )

    def _shares(self) -> KvShares:
        """Say what the blocks of every rank contain."""
        architecture, ranks = self._loaded.architecture, range(self._parallel.size)
        layers = range(architecture.num_layers)
        held = [[head_share(architecture, layer, rank, self._parallel.size).kv for layer in layers] for rank in ranks]
        return KvShares(
            groups=tuple(self._groups_of(rank) for rank in ranks),
            heads=tuple(tuple((heads.start, heads.stop) for heads in one) for one in held),
        )

    def _plan_cache(self, pool_bytes: int) -> CachePlan:
        scheduler = self._config.scheduler
        plan = plan_cache(
            self._groups_of(0),
            memory_bytes=pool_bytes,
            block_size=self._config.cache.block_size,
            max_model_len=self._max_model_len,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            tensor_parallel_size=self._parallel.size,
            steps_in_flight=scheduler.steps_in_flight or 1,
            host_bytes=self._config.cache.swap_space_bytes,
        )
        return with_rank_shares(plan, self._loaded.architecture)

    def _allocate_slab(self) -> torch.Tensor:
        try:
            return allocate_slab(self._layout, self._loaded.device)
        except (OSError, MemoryError, torch.OutOfMemoryError) as error:
            raise ConfigError(
                f"A KV pool of {self._layout.pool_bytes} bytes cannot be allocated on {self._loaded.device} ({error}); "
                "give a smaller --kv-cache-memory-bytes."
            ) from error

    def _make_copies(self) -> BlockCopies:
        """Allocate the host tier, where there is one, and return the copies between the tiers."""
        memories = {TIER_DEVICE: TierMemory(self._layout, self._slab)}
        if self._plan.host_layout is not None:
            layout, device = rank_layout(self._plan.host_layout, self._layout.groups), self._loaded.device
            slab = allocate_host_slab(
                layout,
                device,
                available_bytes=available_host_bytes(),
                pool_bytes=self._layout.slab_bytes if device.type == "cpu" else 0,
                ranks_on_host=self._ranks_on_host,
            )
            memories[TIER_HOST] = TierMemory(layout, slab)
        return BlockCopies(memories, self._disk_folder())

    def _disk_folder(self) -> BlockFolder | None:
        """Return the files of this rank's blocks; None without a disk tier.

        Raises:
            ConfigError: the directory cannot be used, or its space is smaller than a block.
        """
        cache = self._config.cache
        if cache.disk_cache is None:
            return None
        least = HEADER_BYTES + max(group.block_bytes for group in self._layout.groups)
        if cache.disk_space_bytes < least:
            raise ConfigError(
                f"--disk-space is {cache.disk_space_bytes} bytes; the file of one KV block of this model takes up to {least}. Give "
                "at least that, or leave out --disk-cache."
            )
        return BlockFolder(Path(cache.disk_cache), self._disk_fingerprint(), space_bytes=cache.disk_space_bytes)

    def _disk_fingerprint(self, rank: int | None = None) -> bytes:
        """Return the fingerprint of a rank's blocks, by default of this rank: no other blocks may be read in their place."""
        rank = self._parallel.rank if rank is None else rank
        loaded, model = self._loaded, self._config.model
        facts = (
            replace(model, model="", max_model_len=None),
            (loaded.dtype, loaded.device.type, kernels_on(loaded.device)),
            (self._config.cache.block_size, rank, self._parallel.size),
            self._groups_of(rank),
        )
        return fingerprint(loaded.files, *facts)

    def _make_builder(self, layout: ArenaLayout, slab: torch.Tensor) -> BatchBuilder:
        return BatchBuilder(layout, slab, self._loaded.device, trained_len=self._loaded.architecture.max_position)

    def _forward_probe(self, layout: ArenaLayout) -> None:
        """Run the step that needs the most memory, over a small slab, so that the device's peak memory can be read afterwards."""
        scheduler = self._config.scheduler
        counts = worst_case_counts(
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=self._max_model_len,
        )
        builder = self._make_builder(layout, allocate_slab(layout, self._loaded.device))
        groups = [group.spec for group in layout.groups]
        sampler = ShardedSampler(self._parallel, first_id=self._model.vocab.start)
        start = worst_case_start(groups, counts[0], self._max_model_len)
        worst_case_step(self._model, builder, groups, counts, sampler, start=start)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        scheduler, is_cuda = self._config.scheduler, self._loaded.device.type == "cuda"
        logits_1V = warm_up(
            self._model,
            self._builder,
            self._groups,
            max_tokens=scheduler.max_num_batched_tokens,
            max_model_len=self._max_model_len,
            compiles=is_cuda or uses_cpu_kernels(self._slab),
            compiles_by_rows=is_cuda,
            takes_policies=not kv_policy_obstacle(self._loaded.architecture),
        )
        warm_up_id = 0  # no sequence exists yet, so every id is free
        self._sampler.add(warm_up_id, token_ids=(0,), num_prompt_tokens=1, params=WARM_UP_SAMPLING, seed=0)
        self._sampler.sample(logits_1V, [warm_up_id])
        self._sampler.remove(warm_up_id)
        if self._decode_sizes is not None:
            self._forward.capture(self._decode_sizes, self._slab)
        if records_programs(self._config, list(self._groups), self._slab):
            self._forward.record_programs(max_num_seqs=scheduler.max_num_seqs, max_model_len=self._max_model_len)

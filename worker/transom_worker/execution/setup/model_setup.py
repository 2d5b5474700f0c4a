"""Sets up one rank: loads its part of the model, finds out how large its KV pool may be, allocates the pool, and warms up.

    setup = ModelSetup(config, parallel)         load the model
    num_bytes = setup.pool_bytes()               how large a KV pool fits into the rest of this rank's memory?
    runner = setup.allocate(num_bytes, contents) with the smallest number of all ranks, and the digest of their `setup.contents`

With several ranks, each rank makes the three calls at the same time as the others, because the forward passes in them contain
collectives.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from transom_core.config import EngineConfig
from transom_core.contract import SamplingParams
from transom_core.kv_cache.layout import ArenaLayout
from transom_core.machine.host_memory import available_host_bytes
from transom_core.model_config.architecture import kv_policy_obstacle
from transom_core.model_config.sharding import head_share
from transom_core.model_files.content import ContentPart
from transom_kernels.launch import compile_seconds, compiles_by_rows, kernels_on, uses_cpu_kernels
from transom_kernels.paged_attention.triton.tuning import MAX_PARTIAL_BYTES
from transom_worker.execution import memory
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.device_queue import device_queue
from transom_worker.execution.executor import ExecutorInfo, MemoryReport
from transom_worker.execution.forward_pass import ForwardPass
from transom_worker.execution.replay.backends import decode_sizes, graph_bytes, make_replay
from transom_worker.execution.runner import ModelRunner
from transom_worker.execution.setup.cache_setup import CacheSetup
from transom_worker.execution.setup.dummy_run import warm_up, worst_case_counts, worst_case_start, worst_case_step
from transom_worker.execution.setup.load_progress import OnProgress, fetch_with_progress
from transom_worker.execution.setup.model_loading import ONE_RANK, LoadedModel, load_model, set_threads
from transom_worker.execution.tiers.nixl_agent import open_agent
from transom_worker.execution.tiers.rank_tiers import RankTiers, open_disk_folder
from transom_worker.execution.tiers.remote_reads import RemoteReads
from transom_worker.execution.tiers.slabs import TierMemory, allocate_host_slab, allocate_slab
from transom_worker.models.expanded_prompts import expanded_bytes
from transom_worker.models.parallel.communicator import Parallel
from transom_worker.planner.blocks import rank_layout
from transom_worker.planner.pages import make_layout
from transom_worker.planner.plan import CachePlan
from transom_worker.sampling.sharded import ShardedSampler
from transom_worker.scheduling.step import TIER_DEVICE, TIER_HOST

# Together these compile every sampling kernel: several ranks gather the first row's logits on one rank, and sample slices of the
# second row.
WARM_UP_SAMPLING = (SamplingParams(repetition_penalty=1.1, logprobs=1), SamplingParams())


class ModelSetup:
    """Makes the runner of one rank."""

    def __init__(
        self,
        config: EngineConfig,
        parallel: Parallel = ONE_RANK,
        loaded: LoadedModel | None = None,
        *,
        ranks_on_host: int = 1,
        index_on_host: int = 0,
        on_progress: OnProgress | None = None,
        on_busy: Callable[[], None] = lambda: None,
    ) -> None:
        """Load the model, or use `loaded` instead. `ranks_on_host` ranks share this host's cores and memory; this one is number
        `index_on_host` of them, counted from 0. `on_busy` is called about once a second while memory is pinned and graphs are
        captured.

        Raises:
            ConfigError: the model cannot meet the settings.  ModelError: the model cannot be loaded.
        """
        set_threads(config.num_threads, ranks_on_host=ranks_on_host)
        self._parallel, self._config, self._ranks_on_host = parallel, config, ranks_on_host
        self._on_busy = on_busy
        self._loaded = loaded or load_model(
            config.model,
            self._parallel,
            on_progress,
            lora=config.lora,
            index_on_host=index_on_host,
            ranks_on_host=ranks_on_host,
        )
        self._cache = CacheSetup(config, self._loaded, self._parallel)
        mla = self._loaded.architecture.mla
        self._decode_sizes = decode_sizes(
            config,
            self._parallel,
            [group.spec for group in self._cache.groups],
            max_model_len=self._cache.max_model_len,
            device=self._loaded.device,
            has_indexers=mla is not None and mla.indexer is not None,
        )

    def pool_bytes(self) -> int:
        """Return how many bytes of KV pool fit into this rank's memory.

        Raises:
            ConfigError: no memory is left for a pool.
        """
        loaded, groups = self._loaded, self._cache.groups
        # A few pages are enough for the worst case, which reads block 0 and writes only to dump blocks.
        small = make_layout(groups, 8 * len(groups) * max(group.stride_bytes for group in groups))
        return memory.pool_bytes(
            self._config.cache,
            device=loaded.device,
            max_useful_bytes=self._cache.max_useful_bytes,
            ranks_on_host=self._ranks_on_host,
            made_bytes=small.pool_bytes,
            run_worst_case=lambda: self._run_worst_case(small),
            # The worst case has no long context; with one, an eager step also has partial results of attention and expanded rows.
            graph_bytes=MAX_PARTIAL_BYTES
            + self._expanded_bytes
            + graph_bytes(self._decode_sizes, loaded.architecture, self._config.scheduler, loaded.dtype, loaded.device),
        )

    @property
    def _expanded_bytes(self) -> int:
        """Return the bytes for the keys and values of prompts that layers with latent rows expand."""
        architecture, dtype = self._loaded.architecture, getattr(torch, self._loaded.dtype)
        latent = next((index for index, layer in enumerate(architecture.layers) if layer.latent), 0)
        heads = head_share(architecture, latent, self._parallel.rank, self._parallel.size).num_queries
        return expanded_bytes(architecture, heads, self._cache.max_model_len, dtype.itemsize)

    @property
    def contents(self) -> tuple[ContentPart, ...]:
        """Return this rank's part of the contents of the model's files; empty without files."""
        return () if self._loaded.contents is None else (self._loaded.contents,)

    def allocate(self, pool_bytes: int, contents: bytes = b"") -> ModelRunner:
        """Plan the cache for a pool that fits every rank, allocate this rank's part of it, warm up, and return the runner.

        `contents` is the digest of the model's files; empty if there are none.

        Raises:
            ConfigError: the pool is too small for the model, or larger than the memory.
        """
        plan = self._cache.plan(pool_bytes)
        identity = self._cache.identity(contents)
        tiers = self._allocate_tiers(plan, identity)
        layout, slab = tiers.device
        builder = self._make_builder(layout, slab)
        sampler = ShardedSampler(
            self._parallel, first_id=self._loaded.model.vocab.start, eos_token_ids=self._loaded.eos_token_ids
        )
        forward = self._warm_up(builder, slab, sampler)
        if compiles_by_rows(self._loaded.device):
            tiers.compile_copies()
        return ModelRunner(
            self._loaded.architecture,
            self._parallel,
            info=replace(self._info(plan, layout, forward, identity), memories=tiers.shared_memories),
            tiers=tiers,
            builder=builder,
            forward=forward,
            sampler=sampler,
            queue=device_queue(self._loaded.device, max_rows=self._config.scheduler.max_num_seqs),
            max_num_seqs=self._config.scheduler.max_num_seqs,
            load_adapter=self._loaded.model.load_adapter,
        )

    def _info(self, plan: CachePlan, layout: ArenaLayout, forward: ForwardPass, identity: str) -> ExecutorInfo:
        """Return what the engine must know. `plan` is the whole worker's, `layout` this rank's."""
        loaded, kernels = self._loaded, kernels_on(self._loaded.device)
        dtype: torch.dtype = getattr(torch, loaded.dtype)
        return ExecutorInfo(
            plan=plan,
            max_model_len=self._cache.max_model_len,
            vocab_size=loaded.architecture.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            memory=MemoryReport(
                device=str(loaded.device),
                weight_bytes=loaded.model.weight_bytes,
                activation_bytes=memory.activation_bytes(loaded.architecture, self._config.scheduler, dtype)
                + self._expanded_bytes,
                kv_bytes=layout.slab_bytes,
            ),
            dtype=loaded.dtype,
            kernels=kernels,
            hidden_size=loaded.architecture.hidden_size,
            num_labels=loaded.architecture.num_labels,
            compile_s=compile_seconds() if kernels == "cpu" else 0.0,
            kv_policy_obstacle=kv_policy_obstacle(loaded.architecture),
            num_graphs=forward.num_graphs,
            identity=identity,
            disk_fingerprint=self._cache.disk_fingerprint(identity, 0),
            shares=self._cache.shares(),
        )

    def _allocate_tiers(self, plan: CachePlan, identity: str) -> RankTiers:
        """Allocate the memory of the device tier, and of the host tier if there is one, and open the disk tier's folder if there is
        one."""
        layout, device = rank_layout(plan.layout, self._cache.groups), self._loaded.device
        memories = {TIER_DEVICE: TierMemory(layout, allocate_slab(layout, device))}
        if plan.host_layout is not None:
            host_layout = rank_layout(plan.host_layout, layout.groups)
            allocate = partial(
                allocate_host_slab,
                host_layout,
                device,
                available_bytes=available_host_bytes(),
                pool_bytes=layout.slab_bytes if device.type == "cpu" else 0,
                ranks_on_host=self._ranks_on_host,
            )
            # pinning takes 0.1 s a gigabyte or more
            host_slab = fetch_with_progress(allocate, lambda *_: self._on_busy())
            memories[TIER_HOST] = TierMemory(host_layout, host_slab)
        folder = None
        if self._config.cache.disk_cache is not None:
            fingerprint = self._cache.disk_fingerprint(identity, self._parallel.rank)
            folder = open_disk_folder(self._config.cache, layout, fingerprint)
        agent, remote = open_agent(self._config.transfer, memories), None
        if agent is not None:
            remote = RemoteReads(agent, self._cache.shares(), self._parallel.rank, memories)
        return RankTiers(memories, folder, remote)

    def _make_builder(self, layout: ArenaLayout, slab: torch.Tensor) -> BatchBuilder:
        return BatchBuilder(
            layout,
            slab,
            self._loaded.device,
            trained_len=self._loaded.architecture.max_position,
            takes_adapters=self._config.lora is not None,
        )

    def _run_worst_case(self, layout: ArenaLayout) -> None:
        """Run the step that needs the most memory, over a small slab, so that the device's peak memory can be read afterwards."""
        scheduler, max_model_len, model = self._config.scheduler, self._cache.max_model_len, self._loaded.model
        counts = worst_case_counts(
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=max_model_len,
        )
        builder = self._make_builder(layout, allocate_slab(layout, self._loaded.device))
        groups = [group.spec for group in layout.groups]
        sampler = ShardedSampler(self._parallel, first_id=model.vocab.start)
        start = worst_case_start(groups, counts[0], max_model_len)
        worst_case_step(model, builder, counts, sampler, start=start)

    @torch.inference_mode()
    def _warm_up(self, builder: BatchBuilder, slab: torch.Tensor, sampler: ShardedSampler) -> ForwardPass:
        """Run made-up steps, which compile and choose kernels, and return the forward pass, which may capture CUDA graphs now."""
        model, by_rows = self._loaded.model, compiles_by_rows(self._loaded.device)
        logits_1V = warm_up(
            model,
            builder,
            max_tokens=self._config.scheduler.max_num_batched_tokens,
            max_model_len=self._cache.max_model_len,
            compiles=by_rows or uses_cpu_kernels(slab),
            compiles_by_rows=by_rows,
            takes_policies=not kv_policy_obstacle(self._loaded.architecture),
        )
        warm_up_id = 0  # no sequence exists yet, so every id is free
        for params in WARM_UP_SAMPLING:
            sampler.add(warm_up_id, token_ids=(0,), num_prompt_tokens=1, params=params, seed=0)
            sampler.sample(logits_1V, [warm_up_id])
            sampler.remove(warm_up_id)
        replay = make_replay(
            self._config,
            model,
            builder,
            slab,
            sizes=self._decode_sizes,
            max_model_len=self._cache.max_model_len,
            parallel=self._parallel,
            on_size=self._on_busy,
        )
        return ForwardPass(model, builder, replay)

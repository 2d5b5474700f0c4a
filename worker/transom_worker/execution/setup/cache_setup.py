"""Plans the KV cache of one rank's model: its groups, the arena of all ranks, and the fingerprint of this rank's blocks."""

from __future__ import annotations

from transom_core.config import EngineConfig
from transom_core.kv_cache.kv_shares import KvShares
from transom_core.kv_cache.layout import GroupLayout
from transom_core.model_config.architecture import choose_max_model_len
from transom_core.model_config.sharding import head_share
from transom_worker.execution import memory
from transom_worker.execution.setup.model_identity import disk_fingerprint, model_identity
from transom_worker.execution.setup.model_loading import LoadedModel
from transom_worker.models.parallel import Parallel
from transom_worker.planner import CachePlan, cache_groups, check_runs, plan_cache, with_rank_shares


class CacheSetup:
    """The cache of a loaded model. `max_model_len` is the longest sequence, from the settings or the model."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, parallel: Parallel) -> None:
        """Raises ConfigError if this model's blocks cannot be stored as the settings ask."""
        self._config, self._loaded, self._parallel = config, loaded, parallel
        self.max_model_len = choose_max_model_len(config.model.max_model_len, loaded.architecture)
        self.groups = self._groups_of(parallel.rank)  # of this rank
        check_runs(self.groups, loaded.dtype)

    @property
    def max_useful_bytes(self) -> int:
        """The bytes of a pool that holds all sequences that may run at once, each with `max_model_len` tokens."""
        return memory.max_useful_bytes(self.groups, self._config.scheduler, self.max_model_len)

    def plan(self, pool_bytes: int) -> CachePlan:
        """Return the plan for a pool of this size on every rank.

        Raises:
            ConfigError: the pool is too small for the model.
        """
        scheduler = self._config.scheduler
        plan = plan_cache(
            self._groups_of(0),
            memory_bytes=pool_bytes,
            block_size=self._config.cache.block_size,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            tensor_parallel_size=self._parallel.size,
            steps_in_flight=scheduler.steps_in_flight or 1,
            host_bytes=self._config.cache.swap_space_bytes,
        )
        return with_rank_shares(plan, self._loaded.architecture)

    def shares(self) -> KvShares:
        """Return what the blocks of every rank contain."""
        architecture, ranks = self._loaded.architecture, range(self._parallel.size)
        layers = range(architecture.num_layers)
        held = [[head_share(architecture, layer, rank, self._parallel.size).kv for layer in layers] for rank in ranks]
        return KvShares(
            groups=tuple(self._groups_of(rank) for rank in ranks),
            heads=tuple(tuple((heads.start, heads.stop) for heads in one) for one in held),
        )

    def identity(self, contents: bytes) -> str:
        """Return the identity of the model; `contents` is the digest of its files."""
        return model_identity(contents, self._config.model, self._loaded, self._groups_of(0))

    def disk_fingerprint(self, identity: str, rank: int) -> bytes:
        """Return the fingerprint of a rank's blocks. The rank cannot use blocks in files with another fingerprint."""
        return disk_fingerprint(identity, self._groups_of(rank), rank=rank, num_ranks=self._parallel.size)

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

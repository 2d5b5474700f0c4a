"""Plans the KV cache of one rank's model: its groups, the arena of all ranks, the model's identity and the blocks' fingerprint.

Workers of equal identities compute the same numbers from the same tokens. The identity is a digest of the contents of the model's
files (`model_files.content`) and of all else that decides numbers: number formats, quantisation, windows, ropes (a longrope goes by
`--max-model-len`), and which kernels compute. The number of ranks, memory, batches and layout do not change it: workers that
differ only in these share results. The identity is part of

- the root of every chain of hash blocks (`kv_cache.hashing`), so that no index, tier, mirror or transfer can take one model's
  blocks for another's;
- `CacheShape`, from which routers know it, so that an answer continues only on a worker with the identity that began it;
- the fingerprint of the disk tier's files, a digest that also covers the layout of a rank's blocks.
"""

from hashlib import blake2b

from transom_core.config import EngineConfig
from transom_core.kv_cache.kv_shares import KvShares
from transom_core.kv_cache.layout import GroupLayout
from transom_core.model_config.architecture import choose_max_model_len
from transom_core.model_config.sharding import head_share
from transom_kernels.launch import kernels_on
from transom_worker.execution import memory
from transom_worker.execution.setup.model_loading import LoadedModel
from transom_worker.models.parallel.communicator import Parallel
from transom_worker.planner.blocks import cache_groups
from transom_worker.planner.layer_groups import check_runs
from transom_worker.planner.plan import CachePlan, plan_cache, with_rank_shares

# The version of the code that computes numbers: a digest of its sources without comments. tests/worker/execution/setup/
# test_numerics.py says when another is due, and which. It is written here since reading the sources takes a second of a core.
NUMERICS = "b9eb2c7d42634336"
IDENTITY_BYTES = 16
_DISK_FORMAT = "transom-disk-2"


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
        """Return the bytes of a pool that holds all sequences that may run at once, each with `max_model_len` tokens."""
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
        held = [[head_share(architecture, layer, rank, self._parallel.size) for layer in layers] for rank in ranks]
        return KvShares(
            groups=tuple(self._groups_of(rank) for rank in ranks),
            heads=tuple(tuple((heads.kv.start, heads.kv.stop) for heads in one) for one in held),
            states=tuple(tuple((heads.queries.start, heads.queries.stop) for heads in one) for one in held),
        )

    def identity(self, contents: bytes) -> str:
        """Return the identity of the model, in hexadecimal digits; empty for a model without files.

        `contents` is the digest of its files.
        """
        if not contents:
            return ""
        config, loaded = self._config.model, self._loaded
        formats = {group.spec.name: sorted({layer.format for layer in group.layers}) for group in self._groups_of(0)}
        windows = (config.window, config.sinks, config.chunk, config.window_pattern)
        kernels = (NUMERICS, loaded.device.type, kernels_on(loaded.device))
        facts = (
            contents.hex(),
            loaded.dtype,
            config.quantization,
            formats,
            windows,
            loaded.architecture.ropes,
            kernels,
        )
        if self._config.lora is not None:  # gates and ups are rounded before the activation then
            return _digest(IDENTITY_BYTES, *facts, "lora").hex()
        return _digest(IDENTITY_BYTES, *facts).hex()

    def disk_fingerprint(self, identity: str, rank: int) -> bytes:
        """Return the 32 bytes that tell the files of a rank's blocks from those of other models and layouts, which the rank cannot
        use."""
        return _digest(32, _DISK_FORMAT, identity, rank, self._parallel.size, tuple(self._groups_of(rank)))

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


def _digest(num_bytes: int, *facts: object) -> bytes:
    """Return a digest of facts; the `repr` of each fact must be the same in every process."""
    return blake2b(repr(facts).encode(), digest_size=num_bytes).digest()

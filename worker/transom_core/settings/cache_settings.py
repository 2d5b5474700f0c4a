"""Settings of the KV cache and of its tiers: the KV pool on the device, the host tier and the disk tier."""

from __future__ import annotations

from pydantic import BaseModel, Field

from transom_core.errors import ConfigError


class CacheSettings(BaseModel):
    """The KV pool, the prefix cache, the host tier and the disk tier."""

    block_size: int = Field(16, ge=1, le=256, description="Tokens per KV block and per hash block of the prefix cache.")
    kv_cache_dtype: str = Field(
        "auto",
        description="Number format of the KV cache: auto (the model's), bfloat16, float16, float32, fp8, int8 or int4; or of each "
        "KV group, by kind or name: window=bfloat16,full=int8.",
    )
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Size of each rank's KV pool, such as 512MiB or 4GiB. If unset: on GPUs what "
        "--gpu-memory-utilization leaves, on CPUs a quarter of the free memory, and no more than "
        "--max-num-seqs sequences can use.",
    )
    gpu_memory_utilization: float = Field(
        0.92, gt=0, le=1, description="Share of GPU memory for weights, activations and the KV pool."
    )
    enable_prefix_caching: bool = Field(True, description="Reuse the KV blocks of shared prefixes.")
    window_repair: bool = Field(
        True,
        description="Where a prefix's window blocks are evicted and its full-attention blocks are not, compute only the "
        "tokens that restore the window.",
    )
    hybrid_kv_cache: bool = Field(
        True, description="Off: every layer keeps the KV of all tokens; the results are equal and take more memory."
    )
    swap_space: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Memory of each rank's host tier, in GiB or with a unit such as 512MiB: evicted KV blocks go there, and "
        "come back when a prompt hits them; 0: no host tier. See docs/kv_tiers.md.",
    )
    disk_cache: str | None = Field(
        None,
        description="Directory for KV blocks that leave the memory: prompts find them there even after a restart, and "
        "workers of one host share them. Its files hold what requests contained. If unset: no disk tier.",
    )
    disk_space: int = Field(
        100 * 2**30,
        ge=1,
        description="Space for all files in --disk-cache together, such as 100GiB; those not used for longest are removed first.",
    )
    kv_policy: str | None = Field(
        None,
        description="KV policy of requests that send none, as JSON: which keys and values full-attention layers keep, such "
        'as {"type": "window", "sinks": 4, "window": 1024}.',
    )

    def check_disk(self) -> None:
        """Raise ConfigError if the disk tier has an empty directory name, or nothing to keep because prefix caching is off."""
        if self.disk_cache is None:
            return
        if not self.disk_cache.strip():
            raise ConfigError("--disk-cache is empty; give a directory, or leave it out for no disk tier.")
        if not self.enable_prefix_caching:
            raise ConfigError("--disk-cache keeps cached prefixes; it needs --enable-prefix-caching.")

"""Makes the identity of a model as a worker computes it. Workers of equal identities compute the same numbers from the same tokens.

The identity is a digest of the contents of the model's files (`model_files.content`) and of all else that decides numbers: number
formats, quantisation, windows, and which kernels compute. The number of ranks, memory, batches and layout have no part in it:
workers that differ in these share results. The identity is part of

- the root of every chain of hash blocks (`kv_cache.hashing`), so that no index, tier, mirror or transfer can take one model's
  blocks for another's;
- `CacheShape`, from which routers know it, so that an answer continues only on a worker with the identity that began it;
- the fingerprint of the disk tier's files, which has the layout of a rank's blocks as well.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from transom_kernels.launch import kernels_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transom_core.config import ModelConfig
    from transom_core.kv_cache.layout import GroupLayout
    from transom_worker.execution.setup.model_loading import LoadedModel

NUMERICS = 1  # raise this when a change of kernels or layers changes numbers by more than rounding
IDENTITY_BYTES = 16
_DISK_FORMAT = "transom-disk-2"


def model_identity(contents: bytes, config: ModelConfig, loaded: LoadedModel, groups: Sequence[GroupLayout]) -> str:
    """Return the identity, in hexadecimal digits; empty for a model without files. `groups` may be those of any rank."""
    if not contents:
        return ""
    formats = {group.spec.name: sorted({layer.format for layer in group.layers}) for group in groups}
    windows = (config.window, config.sinks, config.chunk, config.window_pattern)
    kernels = (NUMERICS, loaded.device.type, kernels_on(loaded.device))
    return _digest(IDENTITY_BYTES, contents.hex(), loaded.dtype, config.quantization, formats, windows, kernels).hex()


def disk_fingerprint(identity: str, groups: Sequence[GroupLayout], *, rank: int, num_ranks: int) -> bytes:
    """Return the 32 bytes that tell the files of a rank's blocks from those of other models and layouts.

    `groups` are the rank's own, with the layout of its blocks.
    """
    return _digest(32, _DISK_FORMAT, identity, rank, num_ranks, tuple(groups))


def _digest(num_bytes: int, *facts: object) -> bytes:
    """Return a digest of facts; the `repr` of each fact must be the same in every process."""
    return blake2b(repr(facts).encode(), digest_size=num_bytes).digest()

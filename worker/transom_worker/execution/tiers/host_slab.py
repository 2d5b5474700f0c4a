"""Allocates the host slab, the memory of a rank's host tier. It has the same groups, blocks and pages as the device's slab, but
a different number of pages.

For a GPU it is pinned, so that copies run beside steps. For a CPU it takes memory only as its pages are first touched.

torch's own pinned memory is not used: its allocator rounds up to a power of two, so that a tier of 40 GiB would take 64 GiB, and
one thread would fill it with zeros. The system's memory is zero already, and CUDA pins it as it is (`cudaHostRegister`).
"""

from __future__ import annotations

import weakref

import torch

from transom_core.errors import ConfigError
from transom_core.kv_cache.layout import ArenaLayout
from transom_kernels.cpu.memory import lazy_bytes


def allocate_host_slab(
    layout: ArenaLayout, device: torch.device, *, available_bytes: int, pool_bytes: int = 0, ranks_on_host: int = 1
) -> torch.Tensor:
    """Allocate zeroed bytes for all pages of the host tier of a rank that computes on `device`.

    `available_bytes` is the host's free memory, which `ranks_on_host` ranks share. `pool_bytes` is what
    each rank's KV pool will still take of it: 0 unless the pool is in the host's memory and not touched yet.

    Raises:
        ConfigError: the host's memory is too small.
    """
    needed = ranks_on_host * (layout.slab_bytes + pool_bytes)
    if needed > available_bytes:
        most = max(0, available_bytes // ranks_on_host - pool_bytes)
        pool = f" and KV pools of {pool_bytes} bytes" if pool_bytes else ""
        raise ConfigError(
            f"--swap-space asks for a host tier of {layout.slab_bytes} bytes; with {ranks_on_host} ranks on this host, host tiers"
            f"{pool} take {needed} bytes, and {available_bytes} are free. Give at most {most / 2**30:.2f}GiB."
        )
    try:
        if device.type == "cuda":
            return pinned_bytes(layout.slab_bytes)
        return lazy_bytes(layout.slab_bytes)
    except (OSError, MemoryError, RuntimeError) as error:
        raise ConfigError(
            f"A host tier of {layout.slab_bytes} bytes cannot be allocated ({error}); {available_bytes} bytes are free. Give a "
            "smaller --swap-space."
        ) from error


def pinned_bytes(num_bytes: int) -> torch.Tensor:
    """Return exactly `num_bytes` zeroed bytes that CUDA has pinned; they are unpinned once the tensor is gone.

    Raises:
        RuntimeError: CUDA cannot pin them.
    """
    slab = lazy_bytes(num_bytes)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostRegister(slab.data_ptr(), slab.nbytes, 0))
    # The storage lives until the callback has run: CUDA must forget the pages before the system takes them back.
    end = weakref.finalize(slab, lambda storage: cudart.cudaHostUnregister(storage.data_ptr()), slab.untyped_storage())
    end.atexit = False  # a process that ends gives all its memory back
    return slab

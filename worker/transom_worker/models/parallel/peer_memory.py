"""Maps memory of the GPUs of one host into each other's address space, to sum small tensors (`transom_kernels.all_reduce`).

torch's symmetric memory allocates and maps it. All other collectives run in nccl.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed

from transom_kernels.all_reduce import PeerMemory, fits, one_shot_all_reduce_, region_bytes

MAX_RANKS = 8  # the GPUs that a host usually has; with more, reading all tensors costs more than nccl's ring
# Tensors up to these sizes are summed in one shot: each of R ranks reads the R - 1 other tensors over its links. That is worth it
# while it takes less time than nccl's latency. These are vLLM's limits; `python -m benchmarks.gpu.all_reduce` measures where nccl
# gets faster.
MOST_BYTES_UP_TO_4_RANKS = 512 << 10
MOST_BYTES = 256 << 10

logger = logging.getLogger("transom.worker")
c10d: Any = torch.distributed  # its type stubs lack much of what it exports


class PeerAllReduce:
    """One rank's sums over peer memory."""

    def __init__(self, memory: PeerMemory, region: torch.Tensor) -> None:
        """`region` is this rank's own, which stays mapped as long as something refers to it."""
        self._memory, self._region = memory, region
        self._most_bytes = MOST_BYTES_UP_TO_4_RANKS if len(memory.regions) <= 4 else MOST_BYTES
        self._is_cuda = region.is_cuda
        self._one = torch.ones(1, dtype=torch.int32, pin_memory=self._is_cuda)

    def takes(self, x: torch.Tensor) -> bool:
        """Return whether a tensor is summed here; all ranks, which pass tensors of one shape and dtype, get the same answer."""
        return x.nbytes <= self._most_bytes and fits(x)

    def all_reduce_(self, x: torch.Tensor) -> None:
        """Replace a tensor that this object `takes` by its sum over all ranks, on the current stream."""
        one_shot_all_reduce_(x, self._memory)

    def abort(self) -> None:
        """End launches that wait for a rank. Another thread may call this: a copy engine sets the flag on a stream of its own."""
        with torch.cuda.stream(torch.cuda.Stream(self._region.device) if self._is_cuda else None):  # type: ignore[no-untyped-call]
            self._memory.aborted.copy_(self._one, non_blocking=True)


def map_peers(store: Any, *, rank: int, size: int, host: str, device: torch.device) -> PeerAllReduce | None:
    """Allocate this rank's region and map the regions of all ranks, which find each other through `store`.

    Returns None, on all ranks, if ranks have different hosts, or if a rank cannot map the others' memory; a log line says why.

    Raises:
        RuntimeError: a rank did not answer within the store's timeout.
    """
    hosts = _exchange(store, "host", rank, size, host)
    if size > MAX_RANKS or len(set(hosts)) > 1:
        logger.info("nccl sums tensors of every size: there are %d ranks on %d hosts.", size, len(set(hosts)))
        return None
    made, reason = None, ""
    try:
        made = _map(store, rank, size, device)
    except (RuntimeError, AttributeError, TypeError) as error:  # no access between the GPUs, or another torch
        reason = f"rank {rank}: {str(error).partition(chr(10))[0]}"
    reasons = [one for one in _exchange(store, "mapped", rank, size, reason) if one]
    if reasons:
        logger.warning(
            "nccl sums small tensors too, which is slower: GPUs cannot map each other's memory (%s).", reasons[0]
        )
        return None
    return made


def _map(store: Any, rank: int, size: int, device: torch.device) -> PeerAllReduce:
    symmetric: Any = torch._C._distributed_c10d._SymmetricMemory
    name = "transom_peers"
    symmetric.set_group_info(name, rank, size, c10d.PrefixStore(name, store))
    region = symmetric.empty_strided_p2p((region_bytes(size),), (1,), torch.uint8, device, name)
    region.zero_()
    torch.cuda.synchronize(device)  # before the other ranks learn that this one is ready
    return PeerAllReduce(PeerMemory.of(rank, symmetric.rendezvous(region).buffer_ptrs, device), region)


def _exchange(store: Any, key: str, rank: int, size: int, value: str) -> list[str]:
    """Return the values of all ranks."""
    store.set(f"{key} {rank}", value)
    return [store.get(f"{key} {other}").decode() for other in range(size)]

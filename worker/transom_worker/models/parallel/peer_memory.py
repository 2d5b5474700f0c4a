"""Memory that the GPUs of one host map into each other's address space, for sums of small tensors (`transom_kernels.all_reduce`).

Each rank allocates a region, and opens those of the others by their CUDA IPC handles. CUDA's runtime is called directly: torch's
symmetric memory refuses ranks that each see a single GPU, which are all "device 0", and Ray and our launcher start ranks that way.
CUDA opens handles of GPUs that the process does not see, as nccl does. nccl remains for everything else.
"""

import ctypes
import logging
from typing import Any

import torch

from transom_kernels.all_reduce import PeerMemory, fits, one_shot_all_reduce_, region_bytes

MAX_RANKS = 8  # what a host's GPUs usually are; with more, reading all tensors costs more than nccl's ring
# Tensors up to these sizes are summed in one shot. With R ranks, each reads R - 1 tensors over its links, which has to take less
# time than nccl's latency. These are vLLM's limits; `python -m benchmarks.gpu.all_reduce` measures where nccl gets faster.
MOST_BYTES_UP_TO_4_RANKS = 512 << 10
MOST_BYTES = 256 << 10

HANDLE_BYTES = 64  # of a cudaIpcMemHandle_t
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag that there is

logger = logging.getLogger("transom.worker")


class PeerAllReduce:
    """One rank's sums over peer memory."""

    def __init__(self, memory: PeerMemory) -> None:
        self._memory, self._device = memory, memory.regions.device
        self._most_bytes = MOST_BYTES_UP_TO_4_RANKS if len(memory.regions) <= 4 else MOST_BYTES
        self._one = torch.ones(1, dtype=torch.int32, pin_memory=self._device.type == "cuda")

    def takes(self, x: torch.Tensor) -> bool:
        """Return whether a tensor is summed here; all ranks, which pass tensors of one shape and dtype, get the same answer."""
        return x.nbytes <= self._most_bytes and fits(x)

    def all_reduce_(self, x: torch.Tensor) -> None:
        """Replace a tensor that this object `takes` by its sum over all ranks, on the current stream."""
        one_shot_all_reduce_(x, self._memory)

    def abort(self) -> None:
        """End launches that wait for a rank. Another thread may call this: a copy engine sets the flag on a stream of its own."""
        is_cuda = self._device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream(self._device) if is_cuda else None):  # type: ignore[no-untyped-call]
            self._memory.aborted.copy_(self._one, non_blocking=True)


class Handle(ctypes.Structure):
    """CUDA's `cudaIpcMemHandle_t`."""

    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class CudaRuntime:
    """The calls of CUDA's runtime that torch has no functions for. Every method raises RuntimeError with CUDA's reason."""

    def __init__(self, library: Any) -> None:
        """`library` is the runtime that torch has loaded, see `loaded_runtime`."""
        self._library = library
        library.cudaGetErrorString.restype = ctypes.c_char_p

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new zeroed memory of the current device. It stays allocated until the process ends, since other
        ranks may read it until then."""
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self._call("cudaMemset", address, 0, ctypes.c_size_t(num_bytes))
        self._call("cudaDeviceSynchronize")
        return int(address.value or 0)

    def export(self, address: int) -> bytes:
        """Return the handle by which other processes of the host open memory."""
        handle = Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Return the address in this process of memory that another process has exported."""
        address = ctypes.c_void_p()
        exported = Handle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), exported, ctypes.c_uint(LAZY_PEER_ACCESS))
        return int(address.value or 0)

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._library, name)(*arguments)
        if error:
            self._library.cudaGetLastError()  # it would otherwise be raised by the next kernel that torch launches
            raise RuntimeError(f"{name}: {self._library.cudaGetErrorString(error).decode()}")


def loaded_runtime() -> CudaRuntime:
    """Return the CUDA runtime of this process. Raises RuntimeError: none is loaded."""
    with open("/proc/self/maps") as maps:
        paths = [line.split()[-1] for line in maps if "libcudart.so" in line]
    if not paths:
        raise RuntimeError("torch has loaded no libcudart")
    return CudaRuntime(ctypes.CDLL(paths[0]))


def map_peers(store: Any, *, rank: int, size: int, host: str, device: torch.device) -> PeerAllReduce | None:
    """Allocate this rank's region and open the regions of all ranks, which find each other through `store`.

    Returns None, on all ranks, if ranks have different hosts, or if a rank cannot open another's memory; a log line says why.

    Raises:
        RuntimeError: a rank did not answer within the store's timeout.
    """
    hosts = _exchange(store, "host", rank, size, host)
    if size > MAX_RANKS or len(set(hosts)) > 1:
        logger.info("nccl sums tensors of every size: there are %d ranks on %d hosts.", size, len(set(hosts)))
        return None
    own, handle, reason = 0, b"", ""
    try:
        runtime = loaded_runtime()
        own = runtime.allocate(region_bytes(size))
        handle = runtime.export(own)
    except (RuntimeError, OSError) as error:
        reason = f"rank {rank}: {error}"
    handles = _exchange(store, "region", rank, size, handle.hex())
    addresses: list[int] = []
    if all(handles):
        try:
            addresses = [own if other == rank else runtime.open(bytes.fromhex(handles[other])) for other in range(size)]
        except RuntimeError as error:  # no access between the GPUs
            reason = f"rank {rank}: {error}"
    reasons = [one for one in _exchange(store, "opened", rank, size, reason) if one]
    if reasons:
        logger.warning(
            "nccl sums small tensors too, which is slower: a GPU cannot map another's memory (%s).", reasons[0]
        )
        return None
    return PeerAllReduce(PeerMemory.of(rank, addresses, device))


def _exchange(store: Any, key: str, rank: int, size: int, value: str) -> list[str]:
    """Return the values of all ranks."""
    store.set(f"{key} {rank}", value)
    return [store.get(f"{key} {other}").decode() for other in range(size)]

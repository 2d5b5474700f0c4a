"""One-shot all-reduce: each rank copies its tensor into memory that all ranks can read, waits for the others, and adds all tensors.

nccl's ring passes a small tensor on rank by rank, and each pass costs its latency. One shot costs one pass, but each rank reads
R tensors, so it pays for small tensors only.

Each rank has a *region*, which the others map into their address space:

    area 0 | area 1 | signals

- A program of the kernel has the block of `BLOCK_BYTES` at its index in both areas, for every dtype. In its call `n` it uses area
  n mod 2.
- signals [programs, R] int32: rank r writes n at [p, r] of every region when the block of its program p is there for call n.

A program of rank r may overwrite its block of call n in call n + 2: in call n + 1 it waited for the signals of all ranks, and each
rank sends these after its kernel of call n, which has read the block, has ended. So one wait for each call is enough.

All ranks make the same calls in the same order. Each program counts its calls in device memory, so a captured CUDA graph can replay
them. Programs wait for those of other GPUs, so all programs of a launch have to run at the same time: there are at most
`MAX_PROGRAMS`, and a multiprocessor has room for several of them.

Legend: R ranks, N elements of the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from transom_kernels.prepared_launch import PreparedLaunch

BLOCK_BYTES = 4096  # of a program: 32 for each of its 128 threads
UNIT_BYTES = 16  # what a thread moves at once
MAX_PROGRAMS = 128
CAPACITY_BYTES = MAX_PROGRAMS * BLOCK_BYTES  # of the largest tensor that fits: 512 KiB
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def region_bytes(size: int) -> int:
    """Return the bytes of a rank's region, for `size` ranks: two areas, and the signals."""
    return 2 * CAPACITY_BYTES + MAX_PROGRAMS * size * 4


@dataclass(slots=True)
class PeerMemory:
    """The regions of all ranks as rank `rank` sees them.

    `regions` [R] int64 has the regions' addresses in this process, on this rank's device. All regions must be zero before the first
    call of any rank. A launch that waits for a rank which does not come ends when `aborted` [1] int32 is set from another stream;
    its result is wrong then.
    """

    rank: int
    regions: torch.Tensor
    aborted: torch.Tensor
    calls: torch.Tensor = field(init=False)  # [MAX_PROGRAMS] int32: the calls of each program
    launches: dict[torch.dtype, PreparedLaunch] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.calls = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=self.regions.device)

    @classmethod
    def of(cls, rank: int, addresses: Sequence[int], device: torch.device) -> PeerMemory:
        """Make the memory of a rank from the addresses of all regions."""
        regions = torch.tensor(addresses, dtype=torch.int64, device=device)
        return cls(rank, regions, torch.zeros(1, dtype=torch.int32, device=device))


def fits(x: torch.Tensor) -> bool:
    """Return whether the regions have room for a tensor of whole units, and the kernel takes its dtype and strides."""
    has_room = 0 < x.nbytes <= CAPACITY_BYTES and x.nbytes % UNIT_BYTES == 0
    return has_room and x.dtype in DTYPES and x.is_contiguous()


def one_shot_all_reduce_(x: torch.Tensor, memory: PeerMemory) -> torch.Tensor:
    """Replace `x` by its sum over all ranks, bit for bit the same on every rank, and return `x`.

    The sum is taken in float32 in order of rank, and rounded once. `x` must be one that `fits`. The kernel runs on the current
    stream.
    """
    launch = memory.launches.get(x.dtype)
    if launch is None:
        constants = {
            "RANK": memory.rank,
            "SIZE": len(memory.regions),
            "RANKS": triton.next_power_of_2(len(memory.regions)),
            "BLOCK": BLOCK_BYTES // x.element_size(),
            "UNIT": UNIT_BYTES // x.element_size(),
            "AREA": CAPACITY_BYTES,
        }
        launch = memory.launches[x.dtype] = PreparedLaunch(one_shot_all_reduce, constants, num_warps=4)
    grid = (-(-x.nbytes // BLOCK_BYTES), 1, 1)
    launch(grid, (x, memory.regions, memory.calls, memory.aborted), x.nbytes // UNIT_BYTES)
    return x


@triton.jit(do_not_specialize=["num_units"])
def one_shot_all_reduce(
    x,  # [N]
    regions,  # [R] int64: addresses of the ranks' regions
    calls,  # [programs] int32
    aborted,  # [1] int32
    num_units,  # of 16 bytes, in the tensor
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,  # SIZE, rounded up to a power of two
    BLOCK: tl.constexpr,  # elements of a program
    UNIT: tl.constexpr,  # elements of 16 bytes
    AREA: tl.constexpr,  # bytes of an area
):
    """Add one block of all ranks' tensors. The grid is (blocks of N,)."""
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    element_type = x.dtype.element_ty
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at // UNIT < num_units  # constant within a unit, so that Triton moves 16 bytes at once
    area = (call % 2) * AREA

    own = (tl.load(regions + RANK) + area).to(tl.pointer_type(element_type))
    own = tl.multiple_of(own, 16)
    tl.store(own + at, tl.load(x + at, mask=inside), mask=inside)
    tl.debug_barrier()  # all threads have stored before one of them signals

    ranks = tl.arange(0, RANKS)
    is_rank = ranks < SIZE
    signals = (tl.load(regions + ranks, mask=is_rank, other=0) + 2 * AREA).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(signals + program * SIZE + RANK, call, mask=is_rank, sem="release", scope="sys")
    received = (tl.load(regions + RANK) + 2 * AREA).to(tl.pointer_type(tl.int32)) + program * SIZE + ranks
    num_missing = 1
    while num_missing > 0:
        # The difference of two counts stays right when counts pass 2 ** 31.
        lag = call - tl.atomic_add(received, 0, mask=is_rank, sem="acquire", scope="sys")
        # The flag is part of the sum, so that all threads leave the loop in the same round.
        is_waiting = is_rank & (lag > 0) & (tl.load(aborted + 0 * ranks, volatile=True) == 0)
        num_missing = tl.sum(is_waiting.to(tl.int32), 0)
    tl.debug_barrier()  # one thread has seen the signals; the others may load only now

    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in tl.static_range(SIZE):
        peer = (tl.load(regions + rank) + area).to(tl.pointer_type(element_type))
        total += tl.load(tl.multiple_of(peer, 16) + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + at, total.to(element_type), mask=inside)
    tl.store(calls + program, call)

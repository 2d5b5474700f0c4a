"""Up to which size are sums over peer memory faster than nccl's? Needs two GPUs of one host or more.

    python -m benchmarks.gpu.all_reduce

Each GPU has a process. A line for each size has the microseconds of one sum, as replayed from a CUDA graph of 50: by nccl, and over
peer memory. `peer_memory.MOST_BYTES` should be the largest size at which peer memory is faster. No figure exists yet.
"""

import time
from multiprocessing import get_context

import torch

from transom_kernels.all_reduce.gpu import CAPACITY_BYTES
from transom_worker.models.parallel.rendezvous import Rendezvous, connect, host_id

NUM_SUMS, NUM_REPLAYS, TIMEOUT_S = 50, 20, 60.0


def main() -> None:
    size = torch.cuda.device_count()
    if size < 2:
        raise SystemExit(f"This measures sums over several GPUs; torch finds {size} here.")
    rendezvous = Rendezvous([host_id()] * size, device="cuda")
    ranks = [
        get_context("spawn").Process(target=measure, args=(rendezvous.address, rank, size)) for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


def measure(address: str, rank: int, size: int) -> None:
    """Be one rank; the first one prints."""
    torch.cuda.set_device(rank)
    group = connect(address, rank=rank, size=size, timeout_s=TIMEOUT_S, device="cuda")
    peers = group._peers  # type: ignore[attr-defined]
    if peers is None:
        raise SystemExit("These GPUs cannot map each other's memory.")
    peers._most_bytes = CAPACITY_BYTES
    num_bytes = 4096
    while num_bytes <= CAPACITY_BYTES:
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device="cuda")
        group._peers = None  # type: ignore[attr-defined]
        nccl_us = _time_us(group, x)
        group._peers = peers  # type: ignore[attr-defined]
        peers_us = _time_us(group, x)
        if rank == 0:
            print(f"{num_bytes >> 10:4d} KiB   nccl {nccl_us:6.1f} us   peer memory {peers_us:6.1f} us", flush=True)
        num_bytes *= 2
    group.close()


def _time_us(group: object, x: torch.Tensor) -> float:
    group.all_reduce_(x)  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM_SUMS):
            group.all_reduce_(x)  # type: ignore[attr-defined]
    graph.replay()
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin_s) / NUM_SUMS / NUM_REPLAYS * 1e6


if __name__ == "__main__":
    main()

"""All-reduce between ranks on one host, by shared memory and by gloo, beside a bare loop that moves and adds as many bytes.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/collectives.py --ranks 2 4

The bare loop is one process that copies a tensor and adds the other ranks' to it: what no way of adding up can do without.
Prints microseconds, p50 and p99, and the CPU time of one operation, of all ranks together.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import torch

from transom_worker.models.parallel.rendezvous import Rendezvous, connect, host_id

HIDDEN = 576
CASES = [
    (1, torch.float32, 4000),
    (64, torch.float32, 2000),
    (4096, torch.float32, 100),
    (1, torch.bfloat16, 4000),
    (64, torch.bfloat16, 2000),
    (4096, torch.bfloat16, 100),
]  # rows, dtype, rounds


def rank_main(pipe: Connection, address: str, rank: int, size: int, rounds_scale: float) -> None:
    torch.set_num_threads(1)
    comm = connect(address, rank=rank, size=size, timeout_s=60.0)
    for rows, dtype, rounds in CASES:
        x = torch.zeros(rows, HIDDEN, dtype=dtype)
        times, cpu_s = timed(lambda x=x: comm.all_reduce_(x), int(rounds * rounds_scale))
        pipe.send((times, cpu_s))
    comm.close()


def timed(action, rounds: int) -> tuple[list[float], float]:
    for _ in range(5):
        action()
    times, cpu = [], time.process_time()
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return times, (time.process_time() - cpu) / rounds


def bare_loop(size: int, rounds_scale: float) -> list[tuple[list[float], float]]:
    found = []
    for rows, dtype, rounds in CASES:
        tensors = [torch.zeros(rows, HIDDEN, dtype=dtype) for _ in range(size + 1)]

        def action(tensors=tensors) -> None:
            tensors[0].copy_(tensors[-1])
            for other in tensors[1:-1]:
                tensors[0].add_(other)

        found.append(timed(action, int(rounds * rounds_scale)))
    return found


def between_ranks(size: int, hosts: list[str], rounds_scale: float) -> list[tuple[list[float], float]]:
    context = multiprocessing.get_context("spawn")
    rendezvous = Rendezvous(hosts)
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=rank_main, args=(theirs, rendezvous.address, rank, size, rounds_scale))
        process.start()
        pipes.append(ours)
        processes.append(process)
    found = []
    for _ in CASES:
        by_rank = [pipe.recv() for pipe in pipes]
        found.append((by_rank[0][0], sum(cpu_s for _, cpu_s in by_rank)))
    for process in processes:
        process.join()
    rendezvous.close()
    return found


def show(name: str, results: list[tuple[list[float], float]]) -> None:
    for (rows, dtype, _), (times, cpu_s) in zip(CASES, results, strict=True):
        cuts = statistics.quantiles(times, n=100)
        shape = f"{rows}x{HIDDEN} {str(dtype).removeprefix('torch.')}"
        print(f"{name:<24}{shape:<20}{cuts[49] * 1e6:>10.1f}{cuts[98] * 1e6:>12.1f}{cpu_s * 1e6:>12.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=float, default=1.0, help="a factor on the number of rounds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'way, ranks':<24}{'tensor':<20}{'p50 us':>10}{'p99 us':>12}{'CPU us':>12}")
    for size in arguments.ranks:
        show(f"bare loop, {size}", bare_loop(size, arguments.rounds))
        show(f"shared memory, {size}", between_ranks(size, [host_id()] * size, arguments.rounds))
        show(f"gloo, {size}", between_ranks(size, [str(rank) for rank in range(size)], arguments.rounds))


if __name__ == "__main__":
    main()

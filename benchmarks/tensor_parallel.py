"""Steps of one worker on several ranks: what a step takes, what the ranks cost beyond computing and adding up, and what overlaps.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/tensor_parallel.py --ranks 1 2 --trace trace.json

Three tables: decode steps of a model by number of ranks, with start-up times; the overhead of two ranks over one on a model so
small that computing hardly counts, less as many sums as the step has, timed in a bare loop; and how often a step is scheduled
while the first rank runs an earlier one, with one step in flight and with two. `--trace` writes the last run for chrome://tracing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bare_worker import TINY, StepTimes, step_ms, worker, write_tiny_model
from transom_worker.models.parallel.rendezvous import Rendezvous, connect, host_id

LOOP_ROUNDS = 2000


def rank_loop(pipe: Connection, address: str, rank: int, size: int, shape: tuple[int, int]) -> None:
    """A rank that only adds up."""
    torch.set_num_threads(1)
    comm = connect(address, rank=rank, size=size, timeout_s=60.0)
    x, times = torch.zeros(shape), []
    for _ in range(LOOP_ROUNDS):
        begin_s = time.perf_counter()
        comm.all_reduce_(x)
        times.append(time.perf_counter() - begin_s)
    pipe.send(statistics.median(times))
    comm.close()


def sum_ms(size: int, shape: tuple[int, int]) -> float:
    """Milliseconds of one sum over ranks that do nothing else."""
    context = multiprocessing.get_context("spawn")
    rendezvous = Rendezvous([host_id()] * size)
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=rank_loop, args=(theirs, rendezvous.address, rank, size, shape)))
        processes[-1].start()
        pipes.append(ours)
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    rendezvous.close()
    return 1e3 * max(found)


def show_steps(args: argparse.Namespace) -> None:
    """Decode steps of the model, by ranks."""
    print(f"{args.model} in {args.dtype}, {args.batch} sequences, one thread a rank")
    print(f"{'ranks':>5} {'start s':>8} {'step ms':>8} {'on rank 0':>9} {'forward':>8} {'sample':>7} {'outside':>8}")
    for ranks in args.ranks:
        with worker(args.model, ranks=ranks, in_flight=1, batch=args.batch, dtype=args.dtype) as running:
            times = running.decode(args.steps)
        inside, forward, sample = (
            1e3 * statistics.median(pick(step) for step in times)
            for pick in (
                lambda s: s.rank_s[1] - s.rank_s[0],
                lambda s: s.timings.forward_s,
                lambda s: s.timings.sample_s,
            )
        )
        whole = step_ms(times)
        row = (running.start_s, whole, inside, forward, sample, whole - inside)
        print(f"{ranks:>5} {row[0]:>8.1f} {row[1]:>8.2f} {row[2]:>9.2f} {row[3]:>8.2f} {row[4]:>7.2f} {row[5]:>8.2f}")


def show_overhead(args: argparse.Namespace) -> None:
    """What two ranks cost where there is next to nothing to compute."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder))
        took = {}
        for ranks, in_flight in ((1, 1), (2, 1), (2, 2)):
            with worker(model, ranks=ranks, in_flight=in_flight, batch=args.batch, dtype="float32") as running:
                took[ranks, in_flight] = min(step_ms(running.decode(args.steps)) for _ in range(args.repeats))
    num_sums = 2 * TINY["num_hidden_layers"] + 2  # a layer's two, the embedding's, the sampler's
    sums_ms = num_sums * sum_ms(2, (args.batch, TINY["hidden_size"]))
    print(f"\nA model of {TINY['num_hidden_layers']} layers of {TINY['hidden_size']} columns, {args.batch} sequences")
    print(f"one rank {took[1, 1]:.2f} ms a step; {num_sums} sums of two ranks in a bare loop {sums_ms:.2f} ms")
    for in_flight in (1, 2):
        whole = took[2, in_flight]
        over = whole - took[1, 1] - sums_ms
        print(f"two ranks, {in_flight} in flight: {whole:.2f} ms a step, {over:+.2f} ms beyond one rank's and the sums")


def show_overlap(args: argparse.Namespace) -> None:
    """How often a step is scheduled while the first rank is busy with an earlier one."""
    print(f"\nScheduling while rank 0 runs an earlier step: {args.model}, 2 ranks")
    for in_flight in (1, 2):
        with worker(args.model, ranks=2, in_flight=in_flight, batch=args.batch, dtype=args.dtype) as running:
            times = running.decode(args.steps)
        busy = [step.rank_s for step in times]
        inside = sum(_lies_in_one(step.schedule_s, busy) for step in times[in_flight:])
        scheduling = 1e3 * statistics.median(end - begin for begin, end in (step.schedule_s for step in times))
        gap = 1e3 * statistics.median(late[0] - early[1] for early, late in pairwise(busy))
        print(
            f"{in_flight} in flight: step {step_ms(times):.2f} ms, rank 0 idle between steps {gap:.2f} ms, scheduling "
            f"{scheduling:.2f} ms, inside an earlier step in {inside} of {len(times) - in_flight}"
        )
    for index, step in enumerate(times[:6]):
        spans = [f"{1e3 * (at - times[0].rank_s[0]):8.2f}" for at in (*step.schedule_s, *step.rank_s)]
        print(f"  step {index}: scheduled {spans[0]} -{spans[1]} ms   on rank 0 {spans[2]} -{spans[3]} ms")
    if args.trace:
        Path(args.trace).write_text(json.dumps(_chrome_trace(times)))


def _lies_in_one(span: tuple[float, float], others: list[tuple[float, float]]) -> bool:
    return any(begin <= span[0] and span[1] <= end for begin, end in others)


def _chrome_trace(times: list[StepTimes]) -> dict[str, Any]:
    rows = (
        ("engine", "schedule", lambda s: s.schedule_s),
        ("rank 0", "step", lambda s: s.rank_s),
        ("rank 0", "forward", lambda s: s.forward_s),
    )
    events = [
        {
            "name": f"{name} {index}",
            "ph": "X",
            "pid": 0,
            "tid": row,
            "ts": 1e6 * begin_s,
            "dur": 1e6 * (end_s - begin_s),
        }
        for row, name, pick in rows
        for index, (begin_s, end_s) in enumerate(map(pick, times))
    ]
    return {"traceEvents": events}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trace", help="file for the spans of the last run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    show_steps(args)
    show_overhead(args)
    show_overlap(args)


if __name__ == "__main__":
    main()

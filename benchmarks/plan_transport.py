"""One step's way to the ranks and back: round trip, CPU time of the driver, CPU of ranks that wait, for each way to send it.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/plan_transport.py --ranks 1 2 [--only zeromq pipe]

The driver sends a plan of 64 decoding sequences to every rank, each unpacks it, and the first answers with 64 tokens. Ranks are
processes, for the Ray ways actors of a private local Ray. Idle is the share of a core that one rank takes while no plan comes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import zmq

from transom_worker.models.parallel.rendezvous import Rendezvous, connect, host_id
from transom_worker.scheduling.step import STEP_VERSION, StepPlan, StepResult

NUM_SEQS = 64
BOX_BYTES = 8192  # a message of fixed size, where a way has no lengths
IDLE_S = 1.0
CONTEXT = multiprocessing.get_context("spawn")
RoundTrip = Callable[[], object]
Way = Callable[[int], Any]


def make_plan() -> StepPlan:
    rows = list(range(NUM_SEQS))
    return StepPlan(
        version=STEP_VERSION,
        step_id=7,
        seq_ids=[1000 + row for row in rows],
        start=[500 + row for row in rows],
        count=[1] * NUM_SEQS,
        attend_from=[[0] * NUM_SEQS, [300 + row for row in rows]],  # of a full and a window group
        write_from=[[500 + row for row in rows]] * 2,
        logits_from=[500 + row for row in rows],
        sample=[1] * NUM_SEQS,
        input_row=rows,
        input_id=[-1] * NUM_SEQS,
    )


PLAN = make_plan()
RESULT = StepResult(step_id=7, num_copies_done=0, sampled_ids=list(range(30_000, 30_000 + NUM_SEQS)))


def take_step(packed: bytes) -> bytes:
    """What every rank does in each of the ways."""
    assert pickle.loads(packed).step_id == 7
    return pickle.dumps(RESULT)


@contextmanager
def processes(target: Callable[..., None], arguments: list[tuple[Any, ...]]) -> Iterator[list[int]]:
    started = [CONTEXT.Process(target=target, args=each, daemon=True) for each in arguments]
    for process in started:
        process.start()
    try:
        yield [process.pid or 0 for process in started]
    finally:
        for process in started:
            process.kill()
            process.join()


def pipe_rank(pipe: Any, rank: int) -> None:
    while True:
        answer = take_step(pipe.recv_bytes())
        if rank == 0:
            pipe.send_bytes(answer)


@contextmanager
def by_pipe(size: int) -> Iterator[tuple[RoundTrip, list[int]]]:
    ends = [CONTEXT.Pipe() for _ in range(size)]
    pipes = [ours for ours, _ in ends]

    def round_trip() -> object:
        packed = pickle.dumps(PLAN)
        for pipe in pipes:
            pipe.send_bytes(packed)
        return pickle.loads(pipes[0].recv_bytes())

    with processes(pipe_rank, [(theirs, rank) for rank, (_, theirs) in enumerate(ends)]) as pids:
        yield round_trip, pids


def zmq_rank(address: str, rank: int) -> None:
    socket = zmq.Context().socket(zmq.PAIR)
    socket.connect(address)
    while True:
        answer = take_step(socket.recv())
        if rank == 0:
            socket.send(answer)


@contextmanager
def by_zmq(size: int, tcp: bool) -> Iterator[tuple[RoundTrip, list[int]]]:
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        sockets = [context.socket(zmq.PAIR) for _ in range(size)]
        for rank, socket in enumerate(sockets):
            socket.linger = 0
            socket.bind("tcp://127.0.0.1:*" if tcp else f"ipc://{folder}/{rank}")

        def round_trip() -> object:
            packed = pickle.dumps(PLAN)
            for socket in sockets:
                socket.send(packed)
            return pickle.loads(sockets[0].recv())

        addresses = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in sockets]
        with processes(zmq_rank, [(address, rank) for rank, address in enumerate(addresses)]) as pids:
            yield round_trip, pids
        for socket in sockets:
            socket.close()


def pack(message: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(message.ljust(BOX_BYTES, b"\0")), dtype=torch.uint8)


def group_rank(address: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    comm = connect(address, rank=rank, size=size, timeout_s=60.0)
    box = torch.empty(BOX_BYTES, dtype=torch.uint8)
    while True:
        answer = take_step(comm.broadcast_(box).numpy().tobytes())
        comm.gather(pack(answer) if rank == 1 else box[:1])


@contextmanager
def by_group(size: int, one_host: bool) -> Iterator[tuple[RoundTrip, list[int]]]:
    """The driver is one more rank, the first, of a communicator as those for tensors."""
    hosts = [host_id() if one_host else str(rank) for rank in range(size + 1)]
    rendezvous = Rendezvous(hosts)
    nothing = torch.empty(1, dtype=torch.uint8)

    def round_trip() -> object:
        comm.broadcast_(pack(pickle.dumps(PLAN)))
        parts = comm.gather(nothing)
        assert parts is not None
        return pickle.loads(parts[1].numpy().tobytes())

    with processes(group_rank, [(rendezvous.address, rank, size + 1) for rank in range(1, size + 1)]) as pids:
        comm = connect(rendezvous.address, rank=0, size=size + 1, timeout_s=60.0)
        yield round_trip, pids
    comm.close()
    rendezvous.close()


class RayRank:
    """A rank that is an actor."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def step(self, packed: bytes) -> bytes:
        """The answer, where it is the first; else nothing."""
        answer = take_step(packed)
        return answer if self._rank == 0 else b""


@contextmanager
def ray_ranks(size: int) -> Iterator[tuple[list[Any], list[int]]]:
    import ray

    ray.init(address="local", num_cpus=size, include_dashboard=False, log_to_driver=False, logging_level="error")
    ranks = [ray.remote(RayRank).remote(rank) for rank in range(size)]
    yield ranks, ray.get([rank.pid.remote() for rank in ranks])
    ray.shutdown()


@contextmanager
def by_actor_call(size: int) -> Iterator[tuple[RoundTrip, list[int]]]:
    import ray

    def round_trip() -> object:
        packed = pickle.dumps(PLAN)
        return pickle.loads(ray.get([rank.step.remote(packed) for rank in ranks])[0])

    with ray_ranks(size) as (ranks, pids):
        yield round_trip, pids


@contextmanager
def by_compiled_graph(size: int) -> Iterator[tuple[RoundTrip, list[int]]]:
    import ray
    from ray.dag import InputNode, MultiOutputNode

    with ray_ranks(size) as (ranks, pids):
        with InputNode() as packed:
            graph = MultiOutputNode([rank.step.bind(packed) for rank in ranks]).experimental_compile()
        yield lambda: pickle.loads(ray.get(graph.execute(pickle.dumps(PLAN)))[0]), pids
        graph.teardown()


WAYS: dict[str, Way] = {
    "actor call": by_actor_call,
    "compiled graph": by_compiled_graph,
    "gloo": lambda size: by_group(size, one_host=False),
    "shared memory": lambda size: by_group(size, one_host=True),
    "zeromq ipc": lambda size: by_zmq(size, tcp=False),
    "zeromq tcp": lambda size: by_zmq(size, tcp=True),
    "pipe": by_pipe,
}


def cpu_s(pid: int) -> float:
    ticks = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(name: str, size: int, rounds: int) -> None:
    with WAYS[name](size) as (round_trip, pids):
        for _ in range(20):
            assert round_trip() == RESULT
        times, driver = [], time.process_time()
        for _ in range(rounds):
            start = time.perf_counter()
            round_trip()
            times.append(time.perf_counter() - start)
        driver = time.process_time() - driver
        before, start = sum(map(cpu_s, pids)), time.monotonic()
        time.sleep(IDLE_S)
        idle = (sum(map(cpu_s, pids)) - before) / (time.monotonic() - start) / size
        cuts = statistics.quantiles(times, n=100)
        figures = f"{cuts[49] * 1e6:>10.0f}{cuts[98] * 1e6:>10.0f}{driver / rounds * 1e6:>12.0f}{idle:>12.2f}"
        print(f"{name:<18}{size:>6}{figures}", flush=True)


def main() -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_CGRAPH_get_timeout", "60")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=2000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"A plan of {len(pickle.dumps(PLAN))} bytes, a result of {len(pickle.dumps(RESULT))}; microseconds")
    print(f"{'way':<18}{'ranks':>6}{'p50':>10}{'p99':>10}{'driver CPU':>12}{'idle cores':>12}")
    for size in arguments.ranks:
        for name in arguments.only:
            measure(name, size, arguments.rounds)


if __name__ == "__main__":
    main()

"""Workers: where a step's time goes, what batches are made of; `worker_*.py` and `hosts.py` have the other sections."""

from dashboards import hosts, worker_machines, worker_requests
from dashboards.board import Board
from dashboards.colors import PARTS as PART_COLORS, PHASES
from dashboards.panels import Panel, areas, lines, number
from dashboards.queries import WORKER, each_of, mean, quantiles, rate, split

UID = "transom-workers"
STEP_RATE = rate("transom_steps_total", WORKER)


VERSIONS = f'transom_build_info{{{WORKER},worker!=""}}'
NOW = [
    number(
        "Workers",
        f"count(max by (model, worker) ({VERSIONS}))",
        "short",
        shows="Workers that Prometheus hears of.",
        act="Fewer than *Router* has open: their pages come too late; see *Router*, dropped scrapes.",
        width=4,
    ),
    number(
        "Tokens a step",
        mean("transom_step_tokens", WORKER),
        "short",
        shows="Mean tokens that a step computes.",
        act="Near 1 while requests wait: something else than the batch is the limit; see *KV cache*, headroom.",
        width=4,
        decimals=1,
    ),
    number(
        "Tokens generated",
        rate("transom_output_tokens_total", WORKER),
        "short",
        shows="Tokens of answers, a second.",
        act="It falls while requests run: see *Step time by part*.",
        width=4,
    ),
]


PARTS = rate("transom_step_seconds_sum", WORKER, "part")
STEPS = [
    areas(
        "Step time by part",
        {"{{part}}": each_of(PARTS, STEP_RATE)},
        "s",
        shows="Mean seconds of a step: the engine schedules, waits for a result and puts tokens out; "
        "ranks prepare, copy, compute and sample meanwhile. Dashed: `wait`, which these parts of the ranks fill.",
        act="Schedule or output above a tenth of forward: the engine's process is short of CPU. "
        "Copy high: transfers to the device.",
        unstacked=["wait"],
        colors=PART_COLORS,
    ),
    lines(
        "Forward pass",
        quantiles("transom_step_seconds", f'{WORKER},part="forward"'),
        "s",
        shows="Time of a step's forward pass, of all workers. It grows with *Tokens a step*.",
        act="p99 far above p50 is prompts among answers. All up at once: another process takes the machine.",
    ),
    lines(
        "Steps by worker",
        split(rate, "transom_steps_total", WORKER, "worker"),
        "ops",
        shows="Steps a second.",
        act="None while requests run: that worker hangs. Runbook of TransomWorkerStalled.",
    ),
]


BATCHES: list[Panel] = [
    areas(
        "Batch composition",
        {"{{kind}}": each_of(rate("transom_step_rows_total", WORKER, "kind"), STEP_RATE)},
        "short",
        shows="Mean rows of a step: those that compute prompts, and those that generate.",
        act="Many prompt rows slow down answers; lower `--max-num-batched-tokens` if inter-token times matter more.",
        colors=PHASES,
    ),
    areas(
        "Computed tokens by phase",
        split(rate, "transom_computed_tokens_total", WORKER, "phase"),
        "short",
        shows="Tokens computed, a second: prompts, answers, repairs, and what a preemption made necessary again.",
        act="Recompute is waste: see *KV cache*, shortage.",
        colors=PHASES,
    ),
    lines(
        "Sequences a step",
        quantiles("transom_step_sequences", WORKER, 50, 95),
        "short",
        shows="How many requests share a step.",
        act="At `--max-num-seqs` with requests waiting: raise it if the pool has headroom.",
    ),
]


BOARD = Board(
    uid=UID,
    title="Workers",
    description="Engines from the inside: steps, batches, ranks, processes, and how each worker was started.",
    variables=frozenset({"model", "worker"}),
    sections={
        "Now": NOW,
        "Steps": STEPS,
        "Batches": BATCHES,
        "Requests": worker_requests.REQUESTS,
        "Grammars": worker_requests.GRAMMARS,
        "Ranks": worker_machines.RANKS,
        "Hosts": hosts.HOSTS,
        "What router and autoscaler go by": worker_machines.LOADS,
        "Processes and settings": worker_machines.PROCESSES,
    },
)

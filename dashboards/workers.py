"""Workers: where a step's time goes, what batches are made of; `worker_*.py` and `hosts.py` have the other sections."""

from __future__ import annotations

from dashboards import hosts, worker_grammars, worker_machines, worker_requests
from dashboards.board import Board, Section
from dashboards.colors import PARTS as PART_COLORS
from dashboards.colors import PHASES
from dashboards.panels import About, heat, high_is_bad, lines, number
from dashboards.queries import WORKER, Query, buckets, each_of, increase, mean, quantile, quantiles, rate, split

UID = "transom-workers"
STEP_RATE = rate("transom_steps_total", WORKER)


def build() -> Board:
    """The dashboard."""
    return Board(
        uid=UID,
        title="Workers",
        description="Engines from the inside: steps, batches, ranks, processes, and how each worker was started.",
        variables=frozenset({"model", "worker"}),
        sections=(
            NOW,
            STEPS,
            BATCHES,
            worker_requests.REQUESTS,
            worker_grammars.GRAMMARS,
            worker_machines.RANKS,
            hosts.HOSTS,
            worker_machines.LOADS,
            worker_machines.PROCESSES,
        ),
    )


VERSIONS = f'transom_build_info{{{WORKER},worker!=""}}'
NOW = Section(
    title="Now",
    panels=[
        number(
            About(
                title="Workers",
                shows="Workers that Prometheus hears of.",
                act="Fewer than *Router* has open: their pages come too late; see *Router*, dropped scrapes.",
            ),
            Query(expr=f"count(max by (model, worker) ({VERSIONS}))"),
            "short",
            width=4,
        ),
        number(
            About(
                title="Steps",
                shows="Steps of all workers, a second.",
                act="None while requests run: runbook of TransomWorkerStalled.",
            ),
            Query(expr=STEP_RATE),
            "ops",
            width=4,
        ),
        number(
            About(
                title="Forward pass p95",
                shows="Time of a step's forward pass.",
                act="It grows with tokens a step; see *Tokens a step* before looking at the machine.",
            ),
            Query(expr=quantile(0.95, "transom_step_seconds", f'{WORKER},part="forward"')),
            "s",
            width=4,
        ),
        number(
            About(
                title="Tokens a step",
                shows="Mean tokens that a step computes.",
                act="Near 1 while requests wait: something else than the batch is the limit; see *KV cache*, headroom.",
            ),
            Query(expr=mean("transom_step_tokens", WORKER)),
            "short",
            width=4,
            decimals=1,
        ),
        number(
            About(
                title="Tokens generated",
                shows="Tokens of answers, a second.",
                act="It falls while requests run: see *Step time by part*.",
            ),
            Query(expr=rate("transom_output_tokens_total", WORKER)),
            "short",
            width=4,
        ),
        number(
            About(
                title="Rank restarts",
                shows="Times that a worker's ranks were started again, in the time range. Orange from 1, red from 3.",
                act="Runbook of TransomRanksRestart: the worker's log has the reason.",
            ),
            Query(expr=increase("transom_rank_restarts_total", WORKER), instant=True),
            "short",
            limits=high_is_bad(1, 3),
            width=4,
            decimals=0,
        ),
    ],
)


PARTS = rate("transom_step_seconds_sum", WORKER, "part")
STEPS = Section(
    title="Steps",
    panels=[
        lines(
            About(
                title="Step time by part",
                shows="Mean seconds of a step: the engine schedules, waits for a result and puts tokens out; "
                "ranks prepare, copy, compute and sample meanwhile. Dashed: `wait`, which these parts of the ranks fill.",
                act="Schedule or output above a tenth of forward: the engine's process is short of CPU. "
                "Copy high: transfers to the device.",
            ),
            [Query(expr=each_of(PARTS, STEP_RATE), legend="{{part}}")],
            "s",
            stack=True,
            unstacked=["wait"],
            colors=PART_COLORS,
        ),
        lines(
            About(
                title="Forward pass",
                shows="Time of a step's forward pass, of all workers.",
                act="p99 far above p50 is prompts among answers. All up at once: another process takes the machine.",
            ),
            quantiles("transom_step_seconds", f'{WORKER},part="forward"'),
            "s",
        ),
        lines(
            About(
                title="Steps by worker",
                shows="Steps a second.",
                act="None while requests run: that worker hangs. Runbook of TransomWorkerStalled.",
            ),
            split(rate, "transom_steps_total", WORKER, "worker"),
            "ops",
        ),
    ],
)


BATCHES = Section(
    title="Batches",
    panels=[
        lines(
            About(
                title="Batch composition",
                shows="Mean rows of a step: those that compute prompts, and those that generate.",
                act="Many prompt rows slow down answers; lower `--max-num-batched-tokens` if "
                "inter-token times matter more.",
            ),
            [Query(expr=each_of(rate("transom_step_rows_total", WORKER, "kind"), STEP_RATE), legend="{{kind}}")],
            "short",
            stack=True,
            colors=PHASES,
        ),
        lines(
            About(
                title="Computed tokens by phase",
                shows="Tokens computed, a second: prompts, answers, repairs, and what a preemption made "
                "necessary again.",
                act="Recompute is waste: see *KV cache*, shortage.",
            ),
            split(rate, "transom_computed_tokens_total", WORKER, "phase"),
            "short",
            stack=True,
            colors=PHASES,
        ),
        lines(
            About(
                title="Sequences a step",
                shows="How many requests share a step.",
                act="At `--max-num-seqs` with requests waiting: raise it if the pool has headroom.",
            ),
            quantiles("transom_step_sequences", WORKER)[:2],
            "short",
        ),
        heat(
            About(
                title="Tokens a step, spread",
                shows="Steps by how many tokens they compute: small ones generate, large ones take prompts.",
                act="Only the top row: prompts fill every step, answers wait for them.",
            ),
            buckets("transom_step_tokens", WORKER),
            "short",
        ),
        lines(
            About(
                title="Prompt and answer tokens by worker",
                shows="Prompt tokens admitted and tokens generated, a second.",
                act="One worker has far more: see *Router*, placements.",
            ),
            [
                Query(expr=rate("transom_prompt_tokens_total", WORKER, "worker"), legend="{{worker}} prompt"),
                Query(expr=rate("transom_output_tokens_total", WORKER, "worker"), legend="{{worker}} answer"),
            ],
            "short",
            width=12,
        ),
    ],
)

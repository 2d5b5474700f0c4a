"""The Workers dashboard's sections about what workers run on, what they say of their load, and how they were started."""

from __future__ import annotations

from dashboards.board import Section
from dashboards.colors import MEMORY
from dashboards.panels import About, bars, high_is_bad, lines, rows
from dashboards.queries import WORKER, Query, rate, ratio, split, total

CONFIG_COLUMNS = (
    "model",
    "worker",
    "dtype",
    "kv_cache_dtype",
    "device",
    "tensor_parallel_size",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
    "prefix_caching",
    "hybrid_kv_cache",
    "kernels",
)


def info(metric: str, labels: str, columns: tuple[str, ...]) -> str:
    """One row a process, with these labels and none that scraping adds."""
    return f"max by ({', '.join(columns)}) ({metric}{{{labels}}})"


BY = ("worker", "rank")
FORWARD = rate("transom_rank_forward_seconds_total", WORKER, *BY)
BUSY = rate("transom_rank_busy_seconds_total", WORKER, *BY)
RANK_STEPS = rate("transom_rank_steps_total", WORKER, "worker")
DECODE_STEPS = rate("transom_decode_steps_total", WORKER, "worker")
REPLAYED = rate("transom_decode_steps_total", f'{WORKER},mode="replayed"', "worker")
RANK_COLUMNS = ("model", *BY, "host", "device", "pid")
RANKS = Section(
    title="Ranks",
    panels=[
        lines(
            About(
                title="Memory by kind",
                shows="Bytes of weights, KV cache and everything else, all ranks together.",
                act="`other` grows for hours: a leak, worth a report.",
            ),
            split(total, "transom_rank_memory_bytes", WORKER, "kind"),
            "bytes",
            stack=True,
            colors=MEMORY,
        ),
        lines(
            About(
                title="Memory by rank",
                shows="All bytes of a rank: device memory, or its process' on CPUs. *Memory by kind* says what for.",
                act="One grows for hours: a leak, worth a report. Ranks differ: heads do not "
                "divide evenly, `transom plan` says how.",
            ),
            [Query(expr=total("transom_rank_memory_bytes", WORKER, *BY), legend="{{worker}}/{{rank}}")],
            "bytes",
        ),
        lines(
            About(
                title="Rank restarts by worker",
                shows="Times that all ranks of a worker were started again, within ten minutes. Dashed: 1 and 3.",
                act="Runbook of TransomRanksRestart.",
            ),
            [
                Query(
                    expr=f"sum by (worker) (increase(transom_rank_restarts_total{{{WORKER}}}[10m]))",
                    legend="{{worker}}",
                )
            ],
            "short",
            limits=high_is_bad(1, 3),
        ),
        lines(
            About(
                title="Steps out of memory by worker",
                shows="Steps that ran out of memory, within ten minutes. The request that asked for the most ended with "
                "status 503; the others were computed again. Dashed: 1 and 3.",
                act="Another process takes memory of the device, or the pool is too large: lower --gpu-memory-utilization "
                "or --max-num-batched-tokens.",
            ),
            [
                Query(
                    expr=f"sum by (worker) (increase(transom_out_of_memory_steps_total{{{WORKER}}}[10m]))",
                    legend="{{worker}}",
                )
            ],
            "short",
            limits=high_is_bad(1, 3),
        ),
        lines(
            About(
                title="Busy share by rank",
                shows="Share of time in steps.",
                act="Low while requests wait: the engine does not feed the ranks; see *Step time by part*, schedule.",
            ),
            [Query(expr=BUSY, legend="{{worker}}/{{rank}}")],
            "percentunit",
            maximum=1,
        ),
        lines(
            About(
                title="Forward share of busy time",
                shows="Share of a rank's busy time in forward passes; the rest is preparing, copying, "
                "sampling and waiting for others.",
                act="One rank lower than the others of its worker: it waits for them, or they for it; compare hosts.",
            ),
            [Query(expr=ratio(FORWARD, BUSY, *BY), legend="{{worker}}/{{rank}}")],
            "percentunit",
            maximum=1,
        ),
        lines(
            About(
                title="Steps that were replayed",
                shows="Share of steps without prompts, and of all steps, that were replayed from a CUDA graph or a recorded "
                "program, which costs the host next to nothing. Steps with prompts never are.",
                act="Few decode steps: recording failed, which the worker's log explains, or batches differ from the sizes that "
                "were captured.",
            ),
            [
                Query(expr=ratio(REPLAYED, DECODE_STEPS, "worker"), legend="{{worker}} decode steps"),
                Query(expr=ratio(REPLAYED, RANK_STEPS, "worker"), legend="{{worker}} all steps"),
            ],
            "percentunit",
            maximum=1,
        ),
        rows(
            About(
                title="Where ranks run",
                shows="Host, device and process of every rank.",
                act="Ranks of one worker on several hosts: slower sums between them; ask for hosts with more devices.",
            ),
            info("transom_rank_info", WORKER, RANK_COLUMNS),
            RANK_COLUMNS,
        ),
    ],
)


LOAD_SERIES = (
    (
        "Waiting tokens",
        "transom_load_waiting_tokens",
        "short",
        "Prompt tokens in the worker's queue that are still to be computed.",
        "Long bars on one worker only: see *Router*, placements.",
    ),
    (
        "Pool used",
        "transom_load_used_ratio",
        "percentunit",
        "Share of the pool that the worker reports as used.",
        "Compare with *KV cache*: the report is some hundred milliseconds old.",
    ),
    (
        "Prefill speed",
        "transom_load_prefill_tokens_per_second",
        "short",
        "Prompt tokens a second that the worker expects to compute.",
        "Half of what equal workers have: its machine is shared or throttled.",
    ),
    (
        "Decode step",
        "transom_load_decode_step_seconds",
        "s",
        "Seconds that the worker expects a decode step to take.",
        "Twice that of equal workers: its machine is shared or throttled.",
    ),
    (
        "First token, expected",
        "transom_load_first_token_seconds",
        "s",
        "Seconds to a first token, as the worker reports them; autoscaling compares them with the objective.",
        "Above the objective with no new workers: see *Router*, workers wanted.",
    ),
)
LOAD_PANELS = [
    lines(
        About(title=title, shows=shows, act=act),
        [Query(expr=f"max by (worker) ({metric}{{{WORKER}}})", legend="{{worker}}")],
        unit,
        width=8 if place < 3 else 12,
    )
    for place, (title, metric, unit, shows, act) in enumerate(LOAD_SERIES)
]
LOADS = Section(title="What router and autoscaler go by", panels=LOAD_PANELS)


BUILD_COLUMNS = ("model", "worker", "version", "python", "torch", "triton", "ray")
BUILD_LABELS = f'{WORKER},worker!=""'
PROCESSES = Section(
    title="Processes and settings",
    panels=[
        lines(
            About(
                title="CPU of workers",
                shows="Cores that each worker's main process keeps busy; ranks are processes of their own.",
                act="Near 1 with slow steps: scheduling and detokenising are the limit; add workers.",
            ),
            split(rate, "transom_process_cpu_seconds_total", f'{WORKER},worker!=""', "worker"),
            "short",
        ),
        lines(
            About(
                title="Memory of workers",
                shows="Resident bytes of each worker's main process.",
                act="It grows for hours under even load: a leak, worth a report.",
            ),
            split(total, "transom_process_resident_bytes", f'{WORKER},worker!=""', "worker"),
            "bytes",
        ),
        bars(
            About(
                title="Start-up",
                shows="How long each worker took to start. Orange from one minute, red from five.",
                act="Long: weights come over the network; put them on a local disk. It decides how "
                "fast autoscaling helps.",
            ),
            [
                Query(
                    expr=f"max by (worker) (transom_worker_start_seconds{{{WORKER}}})",
                    legend="{{worker}}",
                    instant=True,
                )
            ],
            "s",
            limits=high_is_bad(60, 300),
        ),
        rows(
            About(
                title="Settings",
                shows="What every worker was started with.",
                act="Rows that differ in more than the name: a redeploy is under way, or did not end.",
            ),
            info("transom_worker_config_info", WORKER, CONFIG_COLUMNS),
            CONFIG_COLUMNS,
        ),
        rows(
            About(
                title="Versions",
                shows="What every worker runs on.",
                act="Rows that differ: a redeploy is under way, or hosts have different wheels.",
            ),
            info("transom_build_info", BUILD_LABELS, BUILD_COLUMNS),
            BUILD_COLUMNS,
        ),
    ],
)

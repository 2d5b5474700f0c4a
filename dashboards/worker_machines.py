"""The Workers dashboard's sections about what workers run on, what they say of their load, and how they were started."""

from dashboards.colors import MEMORY
from dashboards.panels import Panel, areas, high_is_bad, lines, rows
from dashboards.queries import WORKER, rate, ratio, split, total
from transom_worker.telemetry.metrics.identity import CONFIG_LABELS

CONFIG_COLUMNS = ("model", "worker", *(label for label in CONFIG_LABELS if label != "identity"))


def info(metric: str, labels: str, columns: tuple[str, ...]) -> str:
    """One row a process, with these labels and none that scraping adds."""
    return f"max by ({', '.join(columns)}) ({metric}{{{labels}}})"


BY = ("worker", "rank")
FORWARD = rate("transom_rank_forward_seconds_total", WORKER, *BY)
BUSY = rate("transom_rank_busy_seconds_total", WORKER, *BY)
RANK_STEPS = rate("transom_rank_steps_total", WORKER, "worker")
DECODE_STEPS = rate("transom_decode_steps_total", WORKER, "worker")
REPLAYED_DECODES = rate("transom_decode_steps_total", f'{WORKER},mode="replayed"', "worker")
REPLAYED_STEPS = rate("transom_rank_steps_total", f'{WORKER},forward="replayed"', "worker")
RANK_COLUMNS = ("model", *BY, "host", "device", "pid")
RANKS: list[Panel] = [
    areas(
        "Memory by kind",
        split(total, "transom_rank_memory_bytes", WORKER, "kind"),
        "bytes",
        shows="Bytes of weights, KV cache and everything else, all ranks together.",
        act="`other` grows for hours: a leak, worth a report.",
        colors=MEMORY,
    ),
    lines(
        "Rank restarts by worker",
        {"{{worker}}": f"sum by (worker) (increase(transom_rank_restarts_total{{{WORKER}}}[10m]))"},
        "short",
        shows="Times that all ranks of a worker were started again, within ten minutes. Dashed: 1 and 3.",
        act="Runbook of TransomRanksRestart.",
        limits=high_is_bad(1, 3),
    ),
    lines(
        "Steps out of memory by worker",
        {"{{worker}}": f"sum by (worker) (increase(transom_out_of_memory_steps_total{{{WORKER}}}[10m]))"},
        "short",
        shows="Steps that ran out of memory, within ten minutes. "
        "The request that asked for the most ended with status 503; the others were computed again. Dashed: 1 and 3.",
        act="Another process takes memory of the device, or the pool is too large: "
        "lower --gpu-memory-utilization or --max-num-batched-tokens.",
        limits=high_is_bad(1, 3),
    ),
    lines(
        "Busy share by rank",
        {"{{worker}}/{{rank}}": BUSY},
        "percentunit",
        shows="Share of time in steps.",
        act="Low while requests wait: the engine does not feed the ranks; see *Step time by part*, schedule.",
        maximum=1,
    ),
    lines(
        "Forward share of busy time",
        {"{{worker}}/{{rank}}": ratio(FORWARD, BUSY, *BY)},
        "percentunit",
        shows="Share of a rank's busy time in forward passes; "
        "the rest is preparing, copying, sampling and waiting for others.",
        act="One rank lower than the others of its worker: it waits for them, or they for it; compare hosts.",
        maximum=1,
    ),
    lines(
        "Steps that were replayed",
        {
            "{{worker}} decode steps": ratio(REPLAYED_DECODES, DECODE_STEPS, "worker"),
            "{{worker}} all steps": ratio(REPLAYED_STEPS, RANK_STEPS, "worker"),
        },
        "percentunit",
        shows="Share of steps without prompts, and of all steps, that were replayed from a CUDA graph or a recorded "
        "program, which costs the host next to nothing. Steps with prompts are on GPUs, up to 512 tokens.",
        act="Few decode steps: recording failed, which the worker's log explains, "
        "or batches differ from the sizes that were captured.",
        maximum=1,
    ),
    lines(
        "Wrong CUDA graphs",
        {"{{worker}} rank {{rank}}": total("transom_rank_wrong_graphs", WORKER, *BY)},
        "none",
        shows="Sizes of steps whose CUDA graph gave other logits than the forward pass. They run eagerly.",
        act="Not 0: report the worker's log line, which names the first layer that differs.",
    ),
    rows(
        "Where ranks run",
        info("transom_rank_info", WORKER, RANK_COLUMNS),
        RANK_COLUMNS,
        shows="Host, device and process of every rank.",
        act="Ranks of one worker on several hosts: slower sums between them; ask for hosts with more devices.",
    ),
]


LOAD_SERIES = (
    (
        "Waiting tokens",
        "transom_load_waiting_tokens",
        "short",
        "Prompt tokens in the worker's queue that are still to be computed.",
        "Long bars on one worker only: see *Router*, placements.",
        8,
    ),
    (
        "Pool used",
        "transom_load_used_ratio",
        "percentunit",
        "Share of the pool that the worker reports as used.",
        "Compare with *KV cache*: the report is some hundred milliseconds old.",
        8,
    ),
    (
        "Prefill speed",
        "transom_load_prefill_tokens_per_second",
        "short",
        "Prompt tokens a second that the worker expects to compute.",
        "Half of what equal workers have: its machine is shared or throttled.",
        8,
    ),
    (
        "Decode step",
        "transom_load_decode_step_seconds",
        "s",
        "Seconds that the worker expects a decode step to take.",
        "Twice that of equal workers: its machine is shared or throttled.",
        12,
    ),
    (
        "First token, expected",
        "transom_load_first_token_seconds",
        "s",
        "Seconds to a first token, as the worker reports them; autoscaling compares them with the objective.",
        "Above the objective with no new workers: see *Router*, workers wanted.",
        12,
    ),
)
LOADS = [
    lines(title, {"{{worker}}": f"max by (worker) ({metric}{{{WORKER}}})"}, unit, shows=shows, act=act, width=width)
    for title, metric, unit, shows, act, width in LOAD_SERIES
]


BUILD_COLUMNS = ("model", "worker", "version", "python", "torch", "triton", "ray")
BUILD_LABELS = f'{WORKER},worker!=""'
PROCESSES: list[Panel] = [
    lines(
        "CPU of workers",
        split(rate, "transom_process_cpu_seconds_total", f'{WORKER},worker!=""', "worker"),
        "short",
        shows="Cores that each worker's main process keeps busy; ranks are processes of their own.",
        act="Near 1 with slow steps: scheduling and detokenising are the limit; add workers.",
    ),
    lines(
        "Memory of workers",
        split(total, "transom_process_resident_bytes", f'{WORKER},worker!=""', "worker"),
        "bytes",
        shows="Resident bytes of each worker's main process.",
        act="It grows for hours under even load: a leak, worth a report.",
    ),
    lines(
        "Start-up",
        {"{{worker}}": f"max by (worker) (transom_worker_start_seconds{{{WORKER}}})"},
        "s",
        shows="How long each worker took to start. Dashed: one minute and five.",
        act="Long: weights come over the network; put them on a local disk. It decides how fast autoscaling helps.",
        limits=high_is_bad(60, 300),
    ),
    rows(
        "Settings",
        info("transom_worker_config_info", WORKER, CONFIG_COLUMNS),
        CONFIG_COLUMNS,
        shows="What every worker was started with.",
        act="Rows that differ in more than the name: a redeploy is under way, or did not end.",
    ),
    rows(
        "Versions",
        info("transom_build_info", BUILD_LABELS, BUILD_COLUMNS),
        BUILD_COLUMNS,
        shows="What every worker runs on.",
        act="Rows that differ: a redeploy is under way, or hosts have different wheels.",
    ),
]

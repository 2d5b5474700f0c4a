"""The Workers dashboard's sections about requests: what each worker has, what waits there, what it refused and put back; and what
the masks and the compiling of grammars cost."""

from dashboards.colors import BREAKS
from dashboards.panels import areas, high_is_bad, lines
from dashboards.queries import WORKER, quantile, rate, rates_ratio, ratio, split, total

TIMES = (("queue", "transom_queue_seconds"), ("prefill", "transom_prefill_seconds"))
COMPILED = rate("transom_grammar_compiles_total", f'{WORKER},outcome="compiled"', "worker")
COMPILING = rate("transom_grammar_compile_seconds_total", WORKER, "worker")
REQUESTS = [
    areas(
        "Requests running by worker",
        split(total, "transom_requests_running", WORKER, "worker"),
        "short",
        shows="How many requests each worker's batch has.",
        act="One worker has few while others queue: it is new, or closed to requests; see *Router*.",
        width=12,
    ),
    areas(
        "Requests waiting by worker",
        split(total, "transom_requests_waiting", WORKER, "worker"),
        "short",
        shows="How many requests each worker's queue has.",
        act="One queue grows alone: its worker is slow or gets one prefix's traffic; see *Router*.",
        width=12,
    ),
    lines(
        "Queue and prefill by worker (p95)",
        {f"{{{{worker}}}} {name}": quantile(0.95, metric, WORKER, "worker") for name, metric in TIMES},
        "s",
        shows="Waiting for the first step, and computing the prompt.",
        act="Queue: too few workers. Prefill: long prompts, or misses.",
        width=12,
    ),
    lines(
        "Time between tokens by worker (p95)",
        {"{{worker}}": quantile(0.95, "transom_inter_token_seconds", WORKER, "worker")},
        "s",
        shows="Between two tokens of one request, in the worker. Dashed: 0.1 s and 0.25 s.",
        act="One worker slow: its machine is; compare step times and CPU below.",
        limits=high_is_bad(0.1, 0.25),
        width=12,
    ),
    areas(
        "Requests not taken",
        split(rate, "transom_requests_refused_total", WORKER, "reason"),
        "reqps",
        shows="Requests that workers refused, a second, by reason. After `overloaded` (the queue is full) and "
        "`worker_unavailable` (ranks start again) the router tries another worker, "
        "and clients get 503 if none takes them.",
        act="`overloaded`: add workers, or raise `--max-waiting` if clients would rather wait. "
        "`internal_error`: a bug; the worker's log has it.",
        colors=BREAKS,
        width=12,
    ),
]


GRAMMARS = [
    lines(
        "Requests held to grammars",
        {
            "{{worker}} running": total("transom_grammar_running_requests", WORKER, "worker"),
            "{{worker}} new a second": rate("transom_grammar_requests_total", WORKER, "worker"),
            "{{worker}} failed a second": rate("transom_grammar_failed_requests_total", WORKER, "worker"),
        },
        "short",
        shows="Requests with a grammar (JSON schemas, required tools, patterns) that run; "
        "those a second that come, and that an error of their grammar ends.",
        act="Errors: schemas that become too complex in mid-answer; "
        "the clients' error message says after how many tokens.",
    ),
    lines(
        "Time for masks by worker",
        split(rate, "transom_grammar_mask_seconds_total", WORKER, "worker"),
        "percentunit",
        shows="Share of its time that each worker's engine waits for masks of allowed tokens. Dashed: 3 % and 10 %.",
        act="Over 3 %: schemas with hundreds of optional properties, or many constrained requests on few cores.",
        limits=high_is_bad(0.03, 0.1),
    ),
    lines(
        "Time of a mask",
        {
            "{{worker}}": rates_ratio(
                "transom_grammar_mask_seconds_total", "transom_grammar_masks_total", WORKER, "worker"
            )
        },
        "s",
        shows="Mean time for which the engine waits for one answer's mask; those of a step are computed together.",
        act="Over 0.1 ms: large enumerations or many optional properties.",
    ),
    lines(
        "Kept grammars",
        split(total, "transom_grammar_cache_bytes", WORKER, "worker"),
        "bytes",
        shows="Bytes of compiled grammars that each worker keeps, of 256 MiB at most.",
        act="At its bound: clients send ever new schemas, and each is compiled.",
    ),
    lines(
        "Compiling grammars",
        {"{{worker}}": ratio(COMPILING, COMPILED, "worker")},
        "s",
        shows="Mean time of compiling a grammar that was not kept, while its request waits.",
        act="Over 0.1 s: large schemas; equal ones are compiled once, so clients should not vary them.",
    ),
    lines(
        "LoRA adapters",
        {
            "{{worker}} {{state}} slots": total("transom_lora_slots", WORKER, "worker, state"),
            "{{worker}} loads a second": rate("transom_lora_loads_total", WORKER, "worker"),
            "{{worker}} time of loads": rate("transom_lora_load_seconds_total", WORKER, "worker"),
        },
        "short",
        shows="Slots for LoRA adapters by state, adapters loaded a second, and the share of time for which steps wait for these.",
        act="All slots used and ever new loads: raise --max-loras.",
    ),
]

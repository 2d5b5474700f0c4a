"""The Overview's sections about latency and about how full the service is."""

from dashboards.colors import REQUESTS
from dashboards.panels import Panel, areas, heat, high_is_bad, lines
from dashboards.queries import API, ROUTER, WORKER, buckets, quantile, quantiles, ratio, total

FIRST_TOKEN_LIMITS = high_is_bad(1, 2)  # two seconds: the default of --first-token-objective-s
INTER_TOKEN_LIMITS = high_is_bad(0.1, 0.25)  # ten tokens a second are read at ease; four are waited for
BUSY = "max by (worker) (sum by (worker, model) (transom_kv_utilization_ratio{" + WORKER + "}))"


def _of_limit(kind: str) -> str:
    limit = total("transom_requests_limit", f'{WORKER},kind="{kind}"')
    return ratio(total(f"transom_requests_{kind}", WORKER), limit)


LATENCY: list[Panel] = [
    lines(
        "Time to first token",
        quantiles("transom_router_first_token_seconds", ROUTER),
        "s",
        exemplars="p99",
        shows="From a request's arrival at the router to its first token. Dots are requests, with their ids. "
        "Dashed: half the objective of 2 s, and the objective.",
        act="Open a dot's id at `/debug/requests/{id}`; *Parts of the first token* has the sum of all.",
        limits=FIRST_TOKEN_LIMITS,
    ),
    lines(
        "Time between tokens",
        quantiles("transom_router_inter_token_seconds", ROUTER),
        "s",
        shows="Between two events of one answer, as the router sends them. Dashed: 0.1 s and 0.25 s.",
        act="p99 far above p50: long prompts share steps with answers, or preemption; see *Workers* and *KV cache*.",
        limits=INTER_TOKEN_LIMITS,
    ),
    lines(
        "Time of whole requests",
        quantiles("transom_router_request_seconds", f"{ROUTER},{API}"),
        "s",
        exemplars="p99",
        shows="From a request's arrival to the end of its answer, `/v1` only; dots are requests, with their ids.",
        act="It grows with the answers' length: compare with *Time between tokens* before calling it slow.",
    ),
    lines(
        "Parts of the first token",
        {
            "queue, router": quantile(0.95, "transom_router_wait_seconds", ROUTER),
            "queue": quantile(0.95, "transom_queue_seconds", WORKER),
            "prefill": quantile(0.95, "transom_prefill_seconds", WORKER),
            "first token, worker": quantile(0.95, "transom_first_token_seconds", WORKER),
            "first token, router": quantile(0.95, "transom_router_first_token_seconds", ROUTER),
        },
        "s",
        shows="Each part's p95. Waiting in the router's queue; "
        "in workers: waiting for the first step, computing the prompt, and both; and all that the router saw.",
        act="Queue high: add workers. Prefill high: prompts are long or miss the cache. "
        "Router far above worker: requests wait at the router, or its process is short of CPU.",
        width=12,
    ),
    lines(
        "Parts of an answer",
        {
            "decode": quantile(0.95, "transom_decode_seconds", WORKER),
            "request": quantile(0.95, "transom_request_seconds", WORKER),
            "inter-token": quantile(0.95, "transom_inter_token_seconds", WORKER),
        },
        "s",
        shows="Each part's p95. In workers: from the first token to the last, from arrival to the end, "
        "and between two tokens.",
        act="Decode grows without longer answers: batches have grown or steps slowed down; see *Workers*.",
        width=12,
    ),
    heat(
        "Time to first token, spread",
        buckets("transom_router_first_token_seconds", ROUTER),
        "s",
        shows="Requests by how long their first token took.",
        act="Two bands: some wait and others do not, as with one slow worker or one client's long prompts; "
        "see *Workers*, queue and prefill by worker.",
    ),
]


LENGTHS = [
    heat(
        "Prompts by length",
        buckets("transom_request_prompt_tokens", WORKER),
        "short",
        shows="Admitted requests by their prompts' tokens.",
        act="A new band of long prompts explains slower first tokens and a fuller cache; "
        "see *Time to first token, spread*.",
    ),
    heat(
        "Answers by length",
        buckets("transom_request_output_tokens", WORKER),
        "short",
        shows="Ended requests by their answers' tokens; those that a client left or an error ended included.",
        act="A band at one length: answers are cut off by `max_tokens`, or the model repeats itself.",
    ),
]


SATURATION = [
    areas(
        "Requests running and waiting",
        {
            "running": total("transom_requests_running", WORKER),
            "waiting in workers": total("transom_requests_waiting", WORKER),
            "waiting at routers": total("transom_router_waiting_requests", ROUTER),
        },
        "short",
        shows="In batches, in workers' queues, and at routers without a worker.",
        act="Waiting grows while running stays: memory or `--max-num-seqs` is the limit; see *KV cache*, headroom.",
        colors=REQUESTS,
    ),
    lines(
        "Cache in use by worker",
        {"{{worker}}": BUSY},
        "percentunit",
        shows="Share of each worker's KV pool that running requests use. Dashed: 80 % and 95 %.",
        act="One worker far above the others: see *Router*, placements. All of them: add workers.",
        limits=high_is_bad(0.8, 0.95),
        maximum=1,
    ),
    lines(
        "Batches and queues in use",
        {"batches": _of_limit("running"), "queues": _of_limit("waiting")},
        "percentunit",
        shows="Requests over their limits in all workers together: "
        "those that run over `--max-num-seqs`, those that wait over `--max-waiting`.",
        act="Batches full with *KV cache* headroom left: raise `--max-num-seqs`. "
        "Queues near full: clients get 503 next; add workers, or limit clients with `--concurrent-requests`.",
        colors={"batches": "blue", "queues": "yellow"},
        width=12,
    ),
    lines(
        "Oldest waiting request",
        {"{{worker}}": f"max by (worker) (transom_queue_oldest_seconds{{{WORKER}}})"},
        "s",
        shows="How long the request has waited, at each worker, that came first of those without a step yet. "
        "Times to the first token know it only once it has one. Dashed: half the objective of 2 s, and the objective.",
        act="It climbs second by second: nothing is begun at all; runbook of TransomWorkerStalled. "
        "It stays high: as for a queue that grows.",
        limits=FIRST_TOKEN_LIMITS,
        width=12,
    ),
]

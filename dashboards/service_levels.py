"""The Overview's sections about latency and about how full the service is."""

from __future__ import annotations

from dashboards import kv_cache, workers
from dashboards.board import Section, to_board
from dashboards.colors import REQUESTS, WORKER_STATES
from dashboards.panels import About, heat, high_is_bad, lines
from dashboards.queries import (
    API,
    ROUTER,
    WORKER,
    Query,
    buckets,
    or_zero,
    quantile,
    quantiles,
    rate,
    ratio,
    seen,
    split,
    total,
)

FIRST_TOKEN_LIMITS = high_is_bad(1, 2)  # two seconds: the default of --first-token-objective-s
INTER_TOKEN_LIMITS = high_is_bad(0.1, 0.25)  # ten tokens a second are read at ease; four are waited for
BUSY = "max by (worker) (sum by (worker, model) (transom_kv_utilization_ratio{" + WORKER + "}))"


def _of_limit(kind: str) -> str:
    limit = total("transom_requests_limit", f'{WORKER},kind="{kind}"')
    return ratio(total(f"transom_requests_{kind}", WORKER), limit)


LATENCY = Section(
    title="Latency",
    panels=[
        lines(
            About(
                title="Time to first token",
                shows="From a request's arrival at the router to its first token. Dots are requests, with their ids. "
                "Dashed: half the objective of 2 s, and the objective.",
                act="Open a dot's id at `/debug/requests/{id}`; *Parts of the first token* has the sum of all.",
            ),
            quantiles("transom_router_first_token_seconds", ROUTER, exemplars=True),
            "s",
            limits=FIRST_TOKEN_LIMITS,
        ),
        lines(
            About(
                title="Time between tokens",
                shows="Between two events of one answer, as the router sends them. Dashed: 0.1 s and 0.25 s.",
                act="p99 far above p50: long prompts share steps with answers, or preemption; see "
                "*Workers* and *KV cache*.",
            ),
            quantiles("transom_router_inter_token_seconds", ROUTER),
            "s",
            limits=INTER_TOKEN_LIMITS,
        ),
        lines(
            About(
                title="Time of whole requests",
                shows="From a request's arrival to the end of its answer, `/v1` only; dots are "
                "requests, with their ids.",
                act="It grows with the answers' length: compare with *Time between tokens* before calling it slow.",
            ),
            quantiles("transom_router_request_seconds", f"{ROUTER},{API}", exemplars=True),
            "s",
        ),
        lines(
            About(
                title="Parts of the first token",
                shows="Each part's p95. Waiting in the router's queue; in workers: waiting for the first step, computing the "
                "prompt, and both; and all that the router saw.",
                act="Queue high: add workers. Prefill high: prompts are long or miss the cache. Router far above "
                "worker: requests wait at the router, or its process is short of CPU.",
            ),
            [
                Query(expr=quantile(0.95, "transom_router_wait_seconds", ROUTER), legend="queue, router"),
                Query(expr=quantile(0.95, "transom_queue_seconds", WORKER), legend="queue"),
                Query(expr=quantile(0.95, "transom_prefill_seconds", WORKER), legend="prefill"),
                Query(expr=quantile(0.95, "transom_first_token_seconds", WORKER), legend="first token, worker"),
                Query(expr=quantile(0.95, "transom_router_first_token_seconds", ROUTER), legend="first token, router"),
            ],
            "s",
            width=12,
        ),
        lines(
            About(
                title="Parts of an answer",
                shows="Each part's p95. In workers: from the first token to the last, from arrival to the end, and "
                "between two tokens.",
                act="Decode grows without longer answers: batches have grown or steps slowed down; see *Workers*.",
            ),
            [
                Query(expr=quantile(0.95, "transom_decode_seconds", WORKER), legend="decode"),
                Query(expr=quantile(0.95, "transom_request_seconds", WORKER), legend="request"),
                Query(expr=quantile(0.95, "transom_inter_token_seconds", WORKER), legend="inter-token"),
            ],
            "s",
            width=12,
        ),
        heat(
            About(
                title="Time to first token, spread",
                shows="Requests by how long their first token took.",
                act="Two bands: some wait and others do not, as with one slow worker or one client's long prompts; see "
                "*Workers*, queue and prefill by worker.",
            ),
            buckets("transom_router_first_token_seconds", ROUTER),
            "s",
        ),
        heat(
            About(
                title="Time of whole requests, spread",
                shows="Requests to `/v1` by how long they took.",
                act="A row on top that stays: requests hang or have very long answers; `/debug/requests` lists what runs.",
            ),
            buckets("transom_router_request_seconds", f"{ROUTER},{API}"),
            "s",
        ),
    ],
)


LENGTHS = Section(
    title="Lengths",
    panels=[
        heat(
            About(
                title="Prompts by length",
                shows="Admitted requests by their prompts' tokens.",
                act="A new band of long prompts explains slower first tokens and a fuller cache; see *Time to first token, "
                "spread*.",
            ),
            buckets("transom_request_prompt_tokens", WORKER),
            "short",
        ),
        heat(
            About(
                title="Answers by length",
                shows="Ended requests by their answers' tokens; those that a client left or an error ended included.",
                act="A band at one length: answers are cut off by `max_tokens`, or the model repeats itself.",
            ),
            buckets("transom_request_output_tokens", WORKER),
            "short",
        ),
    ],
)


SATURATION = Section(
    title="Saturation",
    panels=[
        lines(
            About(
                title="Requests running and waiting",
                shows="In batches, in workers' queues, and at routers without a worker.",
                act="Waiting grows while running stays: memory or `--max-num-seqs` is the limit; see "
                "*KV cache*, headroom.",
            ),
            [
                Query(expr=total("transom_requests_running", WORKER), legend="running"),
                Query(expr=total("transom_requests_waiting", WORKER), legend="waiting in workers"),
                Query(expr=total("transom_router_waiting_requests", ROUTER), legend="waiting at routers"),
            ],
            "short",
            stack=True,
            colors=REQUESTS,
        ),
        lines(
            About(
                title="Cache in use by worker",
                shows="Share of each worker's KV pool that running requests use. Dashed: 80 % and 95 %.",
                act="One worker far above the others: see *Router*, placements. All of them: add workers.",
            ),
            [Query(expr=BUSY, legend="{{worker}}")],
            "percentunit",
            limits=high_is_bad(0.8, 0.95),
            maximum=1,
        ),
        lines(
            About(
                title="Workers by state",
                shows="Open ones take requests; closed ones start or are lost; draining ones end what they have.",
                act="Closed for long: a worker does not start. Its log says why; *Router* has joins and losses.",
            ),
            split(seen, "transom_router_workers", ROUTER, "state"),
            "short",
            stack=True,
            colors=WORKER_STATES,
        ),
        lines(
            About(
                title="Open streams",
                shows="Streamed answers that are being sent, by router.",
                act="Constant though no tokens go out: clients read slowly, or a worker hangs; see *Workers*, steps.",
            ),
            split(total, "transom_router_open_streams", ROUTER, "router"),
            "short",
            stack=True,
        ),
        lines(
            About(
                title="Preemptions",
                shows="Requests sent back to the queue for want of KV blocks, a second.",
                act="More than now and then: the pool is too small for the batch. Lower "
                "`--max-num-seqs` or add memory.",
            ),
            [Query(expr=or_zero(rate("transom_preemptions_total", WORKER)), legend="preempted")],
            "ops",
        ).links([to_board(kv_cache.UID, "KV cache")]),
        lines(
            About(
                title="Steps",
                shows="Steps a second, by worker.",
                act="None while requests run: that worker hangs. Runbook of TransomWorkerStalled.",
            ),
            split(rate, "transom_steps_total", WORKER, "worker"),
            "ops",
        ).links([to_board(workers.UID, "Workers")]),
        lines(
            About(
                title="Batches and queues in use",
                shows="Requests over their limits in all workers together: those that run over `--max-num-seqs`, those that wait "
                "over `--max-waiting`.",
                act="Batches full with *KV cache* headroom left: raise `--max-num-seqs`. Queues near full: clients get 503 next; "
                "add workers, or limit clients with `--concurrent-requests`.",
            ),
            [
                Query(expr=_of_limit("running"), legend="batches"),
                Query(expr=_of_limit("waiting"), legend="queues"),
            ],
            "percentunit",
            colors={"batches": "blue", "queues": "yellow"},
            width=12,
        ),
        lines(
            About(
                title="Oldest waiting request",
                shows="How long the request has waited, at each worker, that came first of those without a step yet. Times to the "
                "first token know it only once it has one. Dashed: half the objective of 2 s, and the objective.",
                act="It climbs second by second: nothing is begun at all; runbook of TransomWorkerStalled. It stays high: as "
                "for a queue that grows.",
            ),
            [Query(expr=f"max by (worker) (transom_queue_oldest_seconds{{{WORKER}}})", legend="{{worker}}")],
            "s",
            limits=FIRST_TOKEN_LIMITS,
            width=12,
        ),
    ],
)

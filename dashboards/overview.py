"""Overview: is the service well, from a client's point of view, and how much room is left."""

from dashboards import kv_cache, router, service_levels
from dashboards.board import Board, firing, to_board
from dashboards.colors import BREAKS, ENDPOINTS, ENDS, ERRORS as ERROR_COLORS, STATUSES
from dashboards.panels import areas, high_is_bad, lines, low_is_bad, number
from dashboards.queries import API, ROUTER, WORKER, happening, or_zero, quantile, rate, ratio, seen, split, total
from dashboards.service_levels import BUSY, FIRST_TOKEN_LIMITS, INTER_TOKEN_LIMITS

UID = "transom-overview"
ERROR_LIMITS = high_is_bad(0.001, 0.01)  # the objective of alerts.yml, and ten times its budget
REQUESTS = rate("transom_router_requests_total", f"{ROUTER},{API}")
ERRORS = or_zero(rate("transom_router_requests_total", f'{ROUTER},{API},status=~"5.."'))


NOW = [
    number(
        "Critical alerts",
        or_zero(f"count({firing('critical')})"),
        "short",
        shows="Critical alerts that fire now, of all models. Red from 1.",
        act="Prometheus' page of alerts names them, as the marks on every panel do; each has a runbook.",
        limits=high_is_bad(1, 1),
        width=2,
    ),
    number(
        "Warnings",
        or_zero(f"count({firing('warning')})"),
        "short",
        shows="Alerts of the severity `warning` that fire now, of all models. Orange from 1.",
        act="As for critical ones.",
        limits=high_is_bad(1, 1000),
        width=2,
    ),
    number(
        "Requests",
        or_zero(REQUESTS),
        "reqps",
        shows="Requests to `/v1` that ended, a second.",
        act="None though clients say that they send some: look at *Workers open*, then at Prometheus' page of targets.",
    ),
    number(
        "Errors",
        ratio(f"({ERRORS})", REQUESTS),
        "percentunit",
        shows="Share of requests that ended with 5xx, answers that broke off while they streamed among them. "
        "Orange from 0.1 %, the objective; red from 1 %.",
        act="Split by status below, then read the router's log for the requests' ids.",
        limits=ERROR_LIMITS,
    ),
    number(
        "First token p95",
        quantile(0.95, "transom_router_first_token_seconds", ROUTER),
        "s",
        shows="From a request's arrival to its first token. Orange from half the objective of 2 s, red above it.",
        act="*Parts of the first token* says whether requests wait in the queue (add workers) or compute long prompts "
        "(look at the hit rate).",
        limits=FIRST_TOKEN_LIMITS,
    ),
    number(
        "Inter-token p95",
        quantile(0.95, "transom_router_inter_token_seconds", ROUTER),
        "s",
        shows="Between two tokens of one answer. Orange from 0.1 s, red from 0.25 s: slower than people read.",
        act="Long prompts in the batch slow every request: lower `--max-num-batched-tokens`, or add workers.",
        limits=INTER_TOKEN_LIMITS,
    ),
    number(
        "Waiting",
        f"({or_zero(total('transom_requests_waiting', WORKER))}) + {total('transom_router_waiting_requests', ROUTER)}",
        "short",
        shows="Requests that no worker computes yet: in workers' queues and at routers. Orange from 10, red from 100.",
        act="Growing for minutes: add workers, or limit clients with `--concurrent-requests`.",
        limits=high_is_bad(10, 100),
    ),
    number(
        "Workers open",
        seen("transom_router_workers", f'{ROUTER},state="open"'),
        "short",
        shows="Workers that take requests. Red at none, which is right only after a scale-down to zero.",
        act="None while requests wait: read the workers' logs for why they do not start, and see *Router*.",
        limits=low_is_bad(1, 1),
        width=2,
    ).links([to_board(router.UID, "Router")]),
    number(
        "Fullest cache",
        f"max({BUSY})",
        "percentunit",
        shows="Share of the KV pool in use by running requests, of the worker with the most. "
        "Orange from 80 %, red from 95 %.",
        act="Near 100 % requests are preempted: see *KV cache*, and add workers or memory.",
        limits=high_is_bad(0.8, 0.95),
    ).links([to_board(kv_cache.UID, "KV cache")]),
]


REFUSED = or_zero(rate("transom_router_requests_total", f'{ROUTER},{API},status="429"'))
LEFT = or_zero(rate("transom_router_requests_total", f'{ROUTER},{API},status="499"'))
TRAFFIC = [
    areas(
        "Requests by status",
        {"{{status}}": happening(rate("transom_router_requests_total", f"{ROUTER},{API}", "status"))},
        "reqps",
        shows="Requests to `/v1` by HTTP status, a second; 499 means that the client left first. "
        "A stream that broke off counts as its error, though it began with 200.",
        act="5xx: the router's log names the request. 429: a client is over its limit. "
        "503: there is no worker, or all queues are full: see *Workers*.",
        shades=STATUSES,
    ),
    areas(
        "Requests by endpoint",
        {"{{endpoint}}": happening(rate("transom_router_requests_total", ROUTER, "endpoint"))},
        "reqps",
        shows="All HTTP requests by route, a second, scrapes and health checks included.",
        act="`other` are paths that do not exist: a client has the wrong base URL.",
        colors=ENDPOINTS,
    ),
    lines(
        "Error ratio",
        {name: ratio(f"({counted})", REQUESTS) for name, counted in (("5xx", ERRORS), ("429", REFUSED), ("499", LEFT))},
        "percentunit",
        shows="Shares of `/v1` requests: server errors (5xx), refused for a client's limit (429), "
        "left by the client (499). Dashed: the objective of 0.1 %, and ten times that.",
        act="5xx over the line: runbook of TransomErrorsBurnBudget. Many 499: clients give up, look at latency.",
        limits=ERROR_LIMITS,
        colors=ERROR_COLORS,
    ),
    areas(
        "How requests ended",
        split(rate, "transom_requests_total", WORKER, "finish_reason"),
        "reqps",
        shows="Requests that workers ended, a second, by reason.",
        act="`length` for most: clients' `max_tokens` cuts answers. `error`: read the worker's log. "
        "`abort`: clients leave.",
        colors=ENDS,
    ),
    lines(
        "Tokens in and out",
        {
            "prompt": rate("transom_router_prompt_tokens_total", ROUTER),
            "answer": rate("transom_router_output_tokens_total", ROUTER),
        },
        "short",
        shows="Prompt and answer tokens a second, as billed over HTTP.",
        act="Out low while requests wait: see *Workers*, step time. "
        "Many more in than out make the hit rate of *KV cache* what costs depend on.",
    ),
    areas(
        "Broken answers",
        {"{{reason}}": happening(rate("transom_router_broken_answers_total", ROUTER, "reason"))},
        "reqps",
        shows="Answers that ended after their first byte and before their last, a second, by reason.",
        act="`client_left` is the client's doing. `worker_unavailable`: see *Router*, failovers. "
        "Others are the codes of errors that clients got: the router's log has each.",
        colors=BREAKS,
    ).no_value("none"),
]


BOARD = Board(
    uid=UID,
    title="Overview",
    description="What clients see: traffic, errors, latency, and how full the service is.",
    variables=frozenset({"model", "worker", "router"}),
    sections={
        "Now": NOW,
        "Traffic and errors": TRAFFIC,
        "Latency": service_levels.LATENCY,
        "Saturation": service_levels.SATURATION,
        "Lengths": service_levels.LENGTHS,
    },
)

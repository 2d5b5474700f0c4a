"""Router: where requests go, how well hits are foreseen, what is done when workers go; `router_fleet.py` has workers it sees."""

from __future__ import annotations

from dashboards import router_fleet
from dashboards.board import Board, Section
from dashboards.panels import About, heat, high_is_bad, lines, number
from dashboards.queries import (
    PLACED,
    ROUTER,
    Query,
    buckets,
    increase,
    or_zero,
    quantile,
    quantiles,
    rate,
    ratio,
    seen,
    split,
    total,
)
from dashboards.router_answers import ANSWERS

UID = "transom-router"
PREDICTED = rate("transom_router_predicted_hit_tokens_total", ROUTER)
ACTUAL = rate("transom_router_actual_hit_tokens_total", ROUTER)
OFF = ratio(rate("transom_router_hit_error_tokens_sum", ROUTER), f"({PREDICTED} > {ACTUAL} or {ACTUAL})")
OFF_LIMITS = high_is_bad(0.1, 0.25)


def build() -> Board:
    """The dashboard."""
    return Board(
        uid=UID,
        title="Router",
        description="Placement and its predictions, mirrors of the workers' indexes, failover, drains and autoscaling.",
        variables=frozenset({"model", "router", "worker"}),
        sections=(
            NOW,
            PLACEMENT,
            PREDICTION,
            ANSWERS,
            router_fleet.MIRRORS,
            router_fleet.FLEET,
            router_fleet.ROUTERS,
        ),
    )


NOW = Section(
    title="Now",
    panels=[
        number(
            About(
                title="Placements",
                shows="Requests sent to a worker, a second.",
                act="None while *Waiting* grows: no worker is open.",
            ),
            Query(expr=or_zero(rate("transom_router_placements_total", PLACED))),
            "reqps",
        ),
        number(
            About(
                title="Waiting",
                shows="Requests that no worker has. Orange from 1, red from 10.",
                act="They wait for room or for a worker: see *Workers by state, and wanted*.",
            ),
            Query(expr=total("transom_router_waiting_requests", ROUTER)),
            "short",
            limits=high_is_bad(1, 10),
        ),
        number(
            About(
                title="Workers open",
                shows="Workers that take requests.",
                act="Fewer than wanted for minutes: runbook of TransomScaleUpStuck.",
            ),
            Query(expr=seen("transom_router_workers", f'{ROUTER},state="open"')),
            "short",
        ),
        number(
            About(
                title="Workers wanted",
                shows="What the autoscaling policy would ask for; `off` without autoscaling.",
                act="Above *Workers open* for long: hosts or devices are missing.",
            ),
            Query(expr=seen("transom_router_desired_workers", ROUTER)),
            "short",
        ).no_value("off"),
        number(
            About(
                title="Prediction off by",
                shows="Tokens between predicted and actual hit, over the greater of both. Orange from 10 %, red from 25 %.",
                act="Runbook of TransomHitPredictionOff.",
            ),
            Query(expr=OFF),
            "percentunit",
            limits=OFF_LIMITS,
        ),
        number(
            About(
                title="Choice p95",
                shows="Cost of one choice, hashing included. Orange from 5 ms, red from 20 ms.",
                act="It grows with prompts' length: add routers (`--router-replicas`).",
            ),
            Query(expr=quantile(0.95, "transom_router_placement_seconds", ROUTER)),
            "s",
            limits=high_is_bad(0.005, 0.02),
        ),
        number(
            About(
                title="Failovers",
                shows="Requests whose worker was lost, in the time range. Orange from 1.",
                act="See *Failovers by outcome*: `resumed` cost clients nothing but time.",
            ),
            Query(expr=increase("transom_router_failovers_total", ROUTER), instant=True),
            "short",
            limits=high_is_bad(1, 100),
            decimals=0,
        ),
        number(
            About(
                title="Dropped scrapes",
                shows="Pages of workers and routers that came too late for a scrape, in the time range. Orange from 1.",
                act="Runbook of TransomScrapesDropped: figures have gaps until it ends.",
            ),
            Query(expr=increase("transom_router_dropped_scrapes_total", ROUTER), instant=True),
            "short",
            limits=high_is_bad(1, 100),
            decimals=0,
        ),
    ],
)


PLACEMENT = Section(
    title="Placement",
    panels=[
        lines(
            About(
                title="Placements by worker",
                shows="Requests sent to each worker, a second.",
                act="One worker has most: one prefix has most of the traffic; see *In flight by "
                "worker* for whether it copes.",
            ),
            split(rate, "transom_router_placements_total", PLACED, "worker"),
            "reqps",
            stack=True,
        ),
        lines(
            About(
                title="Placements by policy",
                shows="Requests sent, a second, by the policy that chose.",
                act="Another policy than `--routing-policy` names: routers were started with different settings.",
            ),
            split(rate, "transom_router_placements_total", PLACED, "policy"),
            "reqps",
            stack=True,
        ),
        lines(
            About(
                title="In flight by worker",
                shows="Requests that each worker has from these routers.",
                act="Far apart while the low ones' pools have room: hits are weighed too high, or loads come late.",
            ),
            split(total, "transom_router_in_flight_requests", PLACED, "worker"),
            "short",
            stack=True,
        ),
        lines(
            About(
                title="Cost of a choice",
                shows="From request to worker, hashing the prompt included. Dashed: 5 ms and 20 ms.",
                act="Compare with *CPU of routers*: near one core, add routers (`--router-replicas`).",
            ),
            quantiles("transom_router_placement_seconds", ROUTER),
            "s",
            limits=high_is_bad(0.005, 0.02),
            width=12,
        ),
        lines(
            About(
                title="Waiting requests by router",
                shows="Requests that no worker has, by router.",
                act="All routers: no worker has room. One router: it does not see the workers; "
                "restart it if that lasts.",
            ),
            split(total, "transom_router_waiting_requests", ROUTER, "router"),
            "short",
            stack=True,
            width=12,
        ),
    ],
)


PREDICTION = Section(
    title="Prediction",
    panels=[
        lines(
            About(
                title="Predicted and actual hits",
                shows="Prompt tokens a second that mirrors said were cached, and that workers found "
                "cached, of the same requests.",
                act="Actual below predicted: blocks are evicted between choice and start; the queue "
                "is long or the cache small.",
            ),
            [Query(expr=PREDICTED, legend="predicted"), Query(expr=ACTUAL, legend="actual")],
            "short",
        ),
        lines(
            About(
                title="Predicted and actual hits by tier",
                shows="The same by where the tokens' KV was: on the device, in the worker's host tier, on its disk, or at a peer "
                "from which the worker fetched it.",
                act="`disk` predicted and not there: files were removed or broken since the worker listed them. "
                "`peer` predicted and not there: transfers fail, see *KV cache*, transfers by outcome.",
            ),
            [
                Query(
                    expr=rate("transom_router_predicted_hit_tokens_total", ROUTER, "tier"), legend="{{tier}} predicted"
                ),
                Query(expr=rate("transom_router_actual_hit_tokens_total", ROUTER, "tier"), legend="{{tier}} actual"),
            ],
            "short",
        ),
        lines(
            About(
                title="Prediction off by, over time",
                shows="Tokens between predicted and actual hit, over the greater of both. Dashed: 10 % and 25 %.",
                act="Runbook of TransomHitPredictionOff; look for resyncs below at the same time.",
            ),
            [Query(expr=OFF, legend="off by")],
            "percentunit",
            limits=OFF_LIMITS,
        ),
        heat(
            About(
                title="Error of predictions",
                shows="Requests by how many tokens predicted and actual hit lie apart; the lowest row is exact.",
                act="A band far up: whole prefixes were gone. Compare with *KV cache*, age at eviction.",
            ),
            buckets("transom_router_hit_error_tokens", ROUTER),
            "short",
            width=8,
        ),
    ],
)

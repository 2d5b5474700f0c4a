"""Router: where requests go, how well hits are foreseen, what is done when workers go; `router_fleet.py` has workers it sees."""

from dashboards import router_fleet
from dashboards.board import Board
from dashboards.colors import CALL_OUTCOMES
from dashboards.panels import Panel, areas, high_is_bad, lines, number
from dashboards.queries import PLACED, ROUTER, happening, increase, or_zero, quantiles, rate, ratio, split, total

UID = "transom-router"
PREDICTED = rate("transom_router_predicted_hit_tokens_total", ROUTER)
ACTUAL = rate("transom_router_actual_hit_tokens_total", ROUTER)
OFF = ratio(rate("transom_router_hit_error_tokens_sum", ROUTER), f"({PREDICTED} > {ACTUAL} or {ACTUAL})")


NOW = [
    number(
        "Placements",
        or_zero(rate("transom_router_placements_total", PLACED)),
        "reqps",
        shows="Requests sent to a worker, a second.",
        act="None while *Waiting* grows: no worker is open.",
    ),
    number(
        "Waiting",
        total("transom_router_waiting_requests", ROUTER),
        "short",
        shows="Requests that no worker has. Orange from 1, red from 10.",
        act="They wait for room or for a worker: see *Workers by state, and wanted*.",
        limits=high_is_bad(1, 10),
    ),
    number(
        "Prediction off by",
        OFF,
        "percentunit",
        shows="Tokens between predicted and actual hit, over the greater of both. Orange from 10 %, red from 25 %.",
        act="Runbook of TransomHitPredictionOff.",
        limits=high_is_bad(0.1, 0.25),
    ),
    number(
        "Failovers",
        increase("transom_router_failovers_total", ROUTER),
        "short",
        shows="Requests whose worker was lost, in the time range. Orange from 1.",
        act="See *Failovers by outcome*: `resumed` cost clients nothing but time.",
        instant=True,
        limits=high_is_bad(1, 100),
        decimals=0,
    ),
]


PLACEMENT = [
    areas(
        "Placements by worker",
        split(rate, "transom_router_placements_total", PLACED, "worker"),
        "reqps",
        shows="Requests sent to each worker, a second.",
        act="One worker has most: one prefix has most of the traffic; see *In flight by worker* for whether it copes.",
    ),
    areas(
        "In flight by worker",
        split(total, "transom_router_in_flight_requests", PLACED, "worker"),
        "short",
        shows="Requests that each worker has from these routers.",
        act="Far apart while the low ones' pools have room: hits are weighed too high, or loads come late.",
    ),
    lines(
        "Cost of a choice",
        quantiles("transom_router_placement_seconds", ROUTER),
        "s",
        shows="From request to worker, hashing the prompt included. Dashed: 5 ms and 20 ms.",
        act="Compare with *CPU of routers*: near one core, add routers (`--router-replicas`).",
        limits=high_is_bad(0.005, 0.02),
        width=12,
    ),
]


PREDICTION: list[Panel] = [
    lines(
        "Predicted and actual hits",
        {"predicted": PREDICTED, "actual": ACTUAL},
        "short",
        shows="Prompt tokens a second that mirrors said were cached, and that workers found cached, "
        "of the same requests.",
        act="Actual below predicted: blocks are evicted between choice and start; the queue is long or the cache small.",
    ),
    lines(
        "Predicted and actual hits by tier",
        {
            "{{tier}} predicted": rate("transom_router_predicted_hit_tokens_total", ROUTER, "tier"),
            "{{tier}} actual": rate("transom_router_actual_hit_tokens_total", ROUTER, "tier"),
        },
        "short",
        shows="The same by where the tokens' KV was: "
        "on the device, in the worker's host tier, on its disk, or at a peer from which the worker fetched it.",
        act="`disk` predicted and not there: files were removed or broken since the worker listed them. "
        "`peer` predicted and not there: transfers fail, see *KV cache*, transfers by outcome.",
    ),
]


OUTPUT = rate("transom_router_output_tokens_total", ROUTER)

ANSWERS = [
    areas(
        "Tool calls by outcome",
        {"{{outcome}}": happening(rate("transom_router_tool_calls_total", ROUTER, "outcome"))},
        "ops",
        shows="Calls in answers, a second: `parsed`, `malformed` (markup that the model's family does not have) or "
        "`incomplete` (the answer ended inside the call).",
        act="`malformed`: the parser does not suit the model (`--tool-call-parser`), or the model is too weak for its "
        "tools; clients hold it to them with `strict`. `incomplete`: clients' `max_tokens` cut calls.",
        colors=CALL_OUTCOMES,
    ).no_value("none"),
    lines(
        "Degraded answers by parser",
        {"{{parser}}": happening(rate("transom_router_degraded_answers_total", ROUTER, "parser"))},
        "ops",
        shows="Answers, a second, whose markup could not be read: clients got it as text.",
        act="All answers with tools: `--tool-call-parser` is not the model's. Now and then: the model errs.",
    ).no_value("none"),
    lines(
        "Reasoning, of all output tokens",
        {"reasoning": ratio(rate("transom_router_reasoning_tokens_total", ROUTER), OUTPUT)},
        "percentunit",
        shows="The share of output tokens that were reasoning, of answers that have ended.",
        act="Most of the output: clients may ask for less with `reasoning_effort`.",
    ),
]


BOARD = Board(
    uid=UID,
    title="Router",
    description="Placement and its predictions, mirrors of the workers' indexes, failover, drains and autoscaling.",
    variables=frozenset({"model", "router", "worker"}),
    sections={
        "Now": NOW,
        "Placement": PLACEMENT,
        "Prediction": PREDICTION,
        "Tool calls and reasoning": ANSWERS,
        "Mirrors": router_fleet.MIRRORS,
        "Workers": router_fleet.FLEET,
        "Routers": router_fleet.ROUTERS,
    },
)

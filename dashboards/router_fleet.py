"""The Router dashboard's sections about the workers that routers see, and about the routers themselves."""

from dashboards.colors import DRAINS, FAILOVERS, WORKER_CHANGES, WORKER_STATES
from dashboards.panels import Panel, areas, lines, rows
from dashboards.queries import PLACED, ROUTER, quantile, rate, seen, split, total
from dashboards.worker_machines import info

VERSIONS = f"transom_router_mirror_version{{{PLACED}}}"
MIRRORS = [
    lines(
        "Mirrored blocks by worker",
        {"{{worker}}": f"max by (worker) (transom_router_mirror_blocks{{{PLACED}}})"},
        "short",
        shows="Blocks in the mirror of each worker's prefix index, of the router with the most.",
        act="Zero for a worker that has cached blocks: its updates do not arrive; see *Resyncs*.",
    ),
    lines(
        "Mirrors' lag between routers",
        {"{{worker}}": f"max by (worker) ({VERSIONS}) - min by (worker) ({VERSIONS})"},
        "short",
        shows="Versions between the newest and the oldest mirror of a worker. Always 0 with one router.",
        act="It grows: one router does not get updates; its choices are worse than the others'.",
    ),
    lines(
        "Resyncs",
        split(rate, "transom_router_resyncs_total", PLACED, "worker"),
        "ops",
        shows="Gaps in a worker's index updates, after which the whole index was asked for, a second.",
        act="More than now and then: updates are lost between worker and router; "
        "look at the network and the router's CPU.",
    ),
]


CHANGES = "transom_router_worker_changes_total"
FLEET = [
    areas(
        "Workers by state, and wanted",
        {
            "{{state}}": seen("transom_router_workers", ROUTER, "state"),
            "wanted": seen("transom_router_desired_workers", ROUTER),
        },
        "short",
        shows="Workers open, closed (starting or lost) and draining. "
        "Dashed: how many the autoscaling policy would ask for.",
        act="Open below wanted for minutes: hosts or devices are missing; runbook of TransomScaleUpStuck.",
        unstacked=["wanted"],
        colors=WORKER_STATES,
    ),
    areas(
        "Workers by the model's identity",
        {"{{identity}}": seen("transom_router_worker_identities", ROUTER, "identity")},
        "short",
        shows="Workers that take requests. Several identities: one model replaces another.",
        act="Several for longer than a redeploy: a folder changed, or workers have different files; compare hosts.",
    ),
    lines(
        "Workers joined, lost, drained",
        {"{{change}}": f"max by (change) (sum by (router, change) (increase({CHANGES}{{{ROUTER}}}[5m])))"},
        "short",
        shows="Changes within five minutes, of the router that saw the most.",
        act="Lost: the worker's log and its host's. Joined and lost in turns: workers crash while they start.",
        colors=WORKER_CHANGES,
    ),
    lines(
        "Drains by outcome",
        split(rate, "transom_router_drains_total", ROUTER, "outcome"),
        "ops",
        shows="Workers that went, a second: everything there had finished, or what had not was moved.",
        act="`moved` often: answers take longer than drains wait; clients see a pause and nothing else.",
        colors=DRAINS,
    ),
    lines(
        "Failovers by outcome",
        split(rate, "transom_router_failovers_total", ROUTER, "outcome"),
        "reqps",
        shows="Requests whose worker was lost, a second: migrated, ended with an error, or stopped as a poison request.",
        act="`gave_up`: clients got an error, see TransomRequestsLost. "
        "`poison`: one request kills workers, see TransomPoisonRequest.",
        colors=FAILOVERS,
        width=12,
    ),
    lines(
        "Losses of workers by cause",
        split(rate, "transom_router_worker_losses_total", ROUTER, "cause"),
        "ops",
        shows="Workers that were lost with requests, a second: what they, their ranks or Ray said.",
        act="`hung`, `crash`, `exception`, `device_error`: the worker's log has the step. "
        "`unknown`: see its host's log.",
        width=12,
    ),
    lines(
        "Suspects by judgement",
        split(rate, "transom_router_suspects_total", ROUTER, "judgement"),
        "reqps",
        shows="Requests that may have ended a worker, a second: suspected, then released, cleared, or the culprit.",
        act="Many suspected, none a culprit: workers fail by themselves, see *Losses of workers by cause*.",
        width=12,
    ),
    lines(
        "Dropped scrapes by target",
        split(rate, "transom_router_dropped_scrapes_total", ROUTER, "target"),
        "ops",
        shows="Pages of workers or routers that came too late, a second.",
        act="Runbook of TransomScrapesDropped.",
        width=12,
    ),
]


COLUMNS = ("model", "router", "version", "python", "ray")
ROUTERS: list[Panel] = [
    lines(
        "First token by router (p95)",
        {"{{router}}": quantile(0.95, "transom_router_first_token_seconds", ROUTER, "router")},
        "s",
        shows="From a request's arrival to its first token.",
        act="One router slow, the others not: its process is short of CPU.",
    ),
    areas(
        "Open streams by router",
        split(total, "transom_router_open_streams", ROUTER, "router"),
        "short",
        shows="Streamed answers that are being sent.",
        act="All on one router: the balancer keeps connections; that is right for few clients.",
    ),
    lines(
        "CPU of routers",
        split(rate, "transom_router_process_cpu_seconds_total", ROUTER, "router"),
        "short",
        shows="Cores that each router's process keeps busy; one is all that it can use.",
        act="Near 1: add routers (`--router-replicas`).",
    ),
    lines(
        "Memory of routers",
        split(total, "transom_router_process_resident_bytes", ROUTER, "router"),
        "bytes",
        shows="Resident bytes of each router's process.",
        act="It grows with mirrors and open streams; without either, it is a leak, worth a report.",
    ),
    lines(
        "Tasks of routers",
        split(total, "transom_router_tasks", ROUTER, "router"),
        "short",
        shows="asyncio tasks of each router's event loop: a few for each request and each worker.",
        act="They do not fall when requests end: a leak, worth a report.",
    ),
    rows(
        "Versions of routers",
        info("transom_build_info", f'{ROUTER},router!=""', COLUMNS),
        COLUMNS,
        shows="What every router runs on.",
        act="Rows that differ: a redeploy is under way, or hosts have different wheels.",
        width=8,
        height=8,
    ),
]

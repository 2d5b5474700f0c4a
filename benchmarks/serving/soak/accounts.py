"""What must add up while nothing runs: KV blocks, requests and tokens, on the page of metrics and against what clients counted."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.serving.soak import journal as promises
from benchmarks.serving.soak.answers import Answer
from benchmarks.serving.soak.cases import GENERATING
from benchmarks.serving.soak.cluster import LOOK_S, Cluster, Page
from benchmarks.serving.soak.journal import Journal

QUIET_S = 90.0
SPARE_TASKS = 10  # of a moment: a page that is being answered, a peer that asks
EMPTY_WHEN_IDLE = (
    "transom_router_waiting_requests",
    "transom_router_in_flight_requests",
    "transom_router_open_streams",
    "transom_requests_running",
    "transom_requests_waiting",
)


@dataclass(slots=True)
class Tally:
    """What clients know. Requests whose client left early count apart: the server may have counted any part of them."""

    ended: Counter[tuple[str, int]] = field(default_factory=Counter)  # by path and status
    num_left: Counter[str] = field(default_factory=Counter)  # by path
    num_choices: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, path: str, answer: Answer) -> None:
        """Count an answer that came to its end."""
        self.ended[path, answer.status] += 1
        if answer.is_good:
            self.num_choices += len(answer.choices)
            self.prompt_tokens += answer.usage["prompt_tokens"]
            self.output_tokens += answer.usage["completion_tokens"]

    def left(self, path: str) -> None:
        """Count a request whose client left, or may have left, before its end."""
        self.num_left[path] += 1


async def quiet_page(cluster: Cluster, journal: Journal) -> Page | None:
    """Wait until nothing runs any more, and check that nothing is left in use; the page at that time."""
    begin_s, missing = journal.now_s, "no page"
    while journal.now_s < begin_s + QUIET_S:
        page = await cluster.page()
        missing = await cluster.what_is_missing(page)
        if page is not None and not (missing := missing or "; ".join(in_use(page))):
            return page
        await asyncio.sleep(LOOK_S)
    journal.broke(promises.BLOCKS, f"after {QUIET_S:.0f} s without a request: {missing}")
    return None


def left_tasks(before: Page, after: Page) -> Iterator[str]:
    """Routers with more asyncio tasks than any had on an earlier page of an idle cluster of the same layout."""
    most = max((one.value for one in before.samples.get("transom_router_tasks", [])), default=0.0)
    for one in after.samples.get("transom_router_tasks", []):
        if one.value > most + SPARE_TASKS:
            yield f"router {one.labels['router']}: {one.value:.0f} tasks, {most:.0f} before"


def in_use(page: Page) -> Iterator[str]:
    """What counts requests or blocks in use, and is not zero."""
    for name in EMPTY_WHEN_IDLE:
        if value := page.sum(name):
            yield f"{name} {value:.0f}"
    if active := page.sum("transom_kv_blocks", state="active"):
        yield f"{active:.0f} active blocks"


def check_page(page: Page, journal: Journal) -> None:
    """Sums within each process of an idle cluster."""
    for worker in page.labels("transom_kv_pool_bytes", "worker"):
        for wrong in wrong_sums(page, worker):
            journal.broke(promises.BLOCKS if "pages" in wrong else promises.SUMS, f"worker {worker}: {wrong}")


def wrong_sums(page: Page, worker: str) -> Iterator[str]:
    """What does not add up at one worker."""
    prompts = page.sum("transom_prompt_tokens_total", worker=worker)
    prefixes = page.sum("transom_prefix_tokens_total", worker=worker)
    if prompts != prefixes:
        yield f"{prompts} prompt tokens, of which {prefixes} have an outcome"
    pool, pages = page.sum("transom_kv_pool_bytes", worker=worker), page.sum("transom_kv_pages", worker=worker)
    leased = page.sum("transom_kv_pages", worker=worker, state="leased")
    used = page.sum("transom_kv_bytes", worker=worker)
    wasted = [one.value for one in page.samples["transom_kv_waste_ratio"] if one.labels["worker"] == worker]
    waste = max(wasted, default=0.0)
    leased_bytes = leased * pool / pages
    if not leased_bytes * (1 - waste) - 1 <= used <= leased_bytes:
        yield f"blocks of {used} bytes in {leased} leased pages of {leased_bytes} bytes, of which {waste:.1%} may be waste"
    placed = page.sum("transom_kv_checkpoint_changes_total", worker=worker, change="placed")
    gone = page.sum("transom_kv_checkpoint_changes_total", worker=worker, change="given_up")
    if page.sum("transom_kv_checkpoints", worker=worker) > placed - gone >= 0:
        yield "more checkpoints than were placed and not given up"


def compare(before: Page, after: Page, tally: Tally, journal: Journal, *, exact: bool) -> None:
    """Compare the routers' counts between two pages with the clients' of the same time.

    Both pages have the same processes. Where clients left early (`exact` is false then) the server may have counted more,
    by at most the number of requests that left.
    """

    def grown(name: str, **labels: str) -> float:
        return after.sum(name, **labels) - before.sum(name, **labels)

    def check(name: str, server: float, clients: float, more: float) -> None:
        """The server's count has to be the clients', or up to `more` above it."""
        if not clients <= server <= clients + more:
            journal.broke(
                promises.SUMS, f"{name}: the server counted {server}, clients {clients} and up to {more} more"
            )

    for path in GENERATING:
        ended = {status: count for (at, status), count in tally.ended.items() if at == path}
        for status, count in sorted(ended.items()):
            more = 0.0 if exact or status >= 400 else tally.num_left[path]
            server = grown("transom_router_requests_total", endpoint=path, status=str(status))
            check(f"requests {path} {status}", server, count, more)
        server = grown("transom_router_requests_total", endpoint=path)
        check(f"requests {path}", server, sum(ended.values()), tally.num_left[path])
    more = 0.0 if exact else float("inf")
    check("prompt tokens", grown("transom_router_prompt_tokens_total"), tally.prompt_tokens, more)
    check("output tokens", grown("transom_router_output_tokens_total"), tally.output_tokens, more)
    finished = grown("transom_requests_total")
    check("choices that ended at workers", finished, tally.num_choices, more)
    admitted = grown("transom_request_prompt_tokens_count")
    check("choices admitted at workers", admitted, tally.num_choices, finished - tally.num_choices)

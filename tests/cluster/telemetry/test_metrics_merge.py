"""The union of several pages is valid and whole, whatever the pages are."""

import pytest
from hypothesis import given, settings, strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from transom_cluster.telemetry.merge_metrics import merge_pages

HARD = 'a\\b"c\nd # {x="y"} } 1'  # in a label's value


def page(worker: str, *, openmetrics: bool) -> str:
    registry = CollectorRegistry()
    labels = ("model", "worker")
    requests = Counter("transom_requests", 'Odd: \\ and "quotes"\nand lines.', (*labels, "reason"), registry=registry)
    requests.labels(HARD, worker, "stop").inc(3)
    Gauge("transom_load", "Load.", labels, registry=registry).labels(HARD, worker).set(float("nan"))
    seconds = Histogram("transom_seconds", "Seconds.", labels, buckets=(0.1, 1), registry=registry)
    seconds.labels(HARD, worker).observe(0.05, {"request_id": f"cmpl-{worker}"})
    Gauge("transom_empty", "Without samples.", labels, registry=registry)
    return (generate_openmetrics if openmetrics else generate_latest)(registry).decode()


def series(text: str, *, openmetrics: bool) -> dict[str, list[tuple[str, str]]]:
    """Sample names and workers by family; a family may come once only."""
    families = list((parse_openmetrics if openmetrics else parse_text)(text))
    assert len({family.name for family in families}) == len(families)
    return {family.name: [(s.name, s.labels["worker"]) for s in family.samples] for family in families}


@pytest.mark.parametrize("openmetrics", [False, True])
def test_families_stand_together(openmetrics: bool) -> None:
    pages = [page(worker, openmetrics=openmetrics) for worker in "abc"]
    merged = merge_pages(pages, openmetrics=openmetrics)
    found = series(merged, openmetrics=openmetrics)
    assert found["transom_requests"] == [("transom_requests_total", worker) for worker in "abc"]
    assert [worker for _, worker in found["transom_seconds"]] == [worker for worker in "abc" for _ in range(5)]
    assert (found["transom_empty"], merged.count("# TYPE transom_load gauge\n")) == ([], 1)
    assert merged.endswith("# EOF\n") == openmetrics
    assert merge_pages(pages[:1], openmetrics=openmetrics) == pages[0]


@pytest.mark.parametrize("openmetrics", [False, True])
def test_a_page_that_was_cut_anywhere_leaves_the_union_valid(openmetrics: bool) -> None:
    whole, other = page("a", openmetrics=openmetrics), page("b", openmetrics=openmetrics)
    for end in range(len(whole)):
        if not openmetrics and whole[:end].endswith("\n"):
            continue  # it cannot be told
        merged = merge_pages([other, whole[:end]], openmetrics=openmetrics)
        for samples in series(merged, openmetrics=openmetrics).values():
            assert [one for one in samples if one[1] == "b"] or not samples


@pytest.mark.parametrize(
    "odd",
    [
        "",
        "<html>Bad gateway</html>\n",
        "transom_load 1\n",
        "# HELP transom_load Load.\ntransom_load 1\n",
        "# HELP transom_load\n# TYPE transom_load gauge\n",
        "# HELP transom_load Load.\n# TYPE transom_other gauge\ntransom_load 1\n",
        "# HELP transom_load Load.\n# TYPE transom_load gouge\ntransom_load 1\n",
        '# HELP transom_load Load.\n# TYPE transom_load counter\ntransom_load{worker="a"} 1\n',
        '# HELP transom_load Load.\n# TYPE transom_load gauge\ntransom_load{worker="a"} one\n',
        '# HELP transom_load Load.\n# TYPE transom_load gauge\ntransom_other{worker="a"} 1\n',
        '# HELP transom_load Load.\n# TYPE transom_load gauge\n\ntransom_load{worker="a"} 1\n# EOF\n# EOF\n',
    ],
)
def test_odd_pages_are_left_out(odd: str) -> None:
    for openmetrics in (False, True):
        good = page("b", openmetrics=openmetrics)
        ended = odd + "# EOF\n" if openmetrics else odd
        assert merge_pages([good, ended], openmetrics=openmetrics) == good
        after = series(merge_pages([ended, good], openmetrics=openmetrics), openmetrics=openmetrics)
        assert after["transom_requests"] == [("transom_requests_total", "b")]


ODD_LINES = ("", "# EOF", "# HELP", "# TYPE x y", 'x{a="b"} 1 2 3', "transom_load 1")
LINES = [*page("a", openmetrics=True).splitlines(), *ODD_LINES]


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(lines=st.lists(st.sampled_from(LINES), max_size=12))
def test_any_lines_in_any_order_make_a_page_that_parses(lines: list[str]) -> None:
    merged = merge_pages(["".join(f"{line}\n" for line in lines) + "# EOF\n"])
    names = [line.split(" ")[2] for line in merged.splitlines() if line.startswith("# TYPE ")]
    assert len(names) == len(set(names))
    for family in parse_text(merged):
        assert family.type != "unknown" or not family.samples

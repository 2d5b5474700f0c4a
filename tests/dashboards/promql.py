"""What a PromQL query names: its metrics with the labels that it matches or splits by, as a parser sees them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import promql_parser

GRAFANA = {  # in this order: a longer name before its beginning
    "$__rate_interval": "20s",
    "$__interval": "5s",
    "$__range": "1h",
}
OF_A_HISTOGRAM = ("_bucket", "_sum", "_count")


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """One selector of a query: a metric, and every label that the query speaks of there."""

    metric: str
    labels: frozenset[str]


def parse(expr: str) -> promql_parser.Expr:
    """The query with Grafana's variables filled in; ValueError where it is no PromQL."""
    for name, value in GRAFANA.items():
        expr = expr.replace(name, value)
    return promql_parser.parse(re.sub(r"\$(model|worker|router|group)\b", "x", expr))


def named(expr: str) -> list[Named]:
    """Every selector of a query, with the labels of its matchers and of all aggregations around it."""
    return list(_named(parse(expr), frozenset()))


def kept_labels(expr: str) -> set[str]:
    """Labels that some aggregation of the query keeps: those that a legend may name."""
    labels: set[str] = set()

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            labels.update(node.modifier.labels)

    promql_parser.walk(parse(expr), pre_visit=visit)
    return labels


def _named(node: object, around: frozenset[str]) -> Iterator[Named]:
    if isinstance(node, promql_parser.VectorSelector):
        matched = {matcher.name for matcher in node.matchers.matchers}
        yield Named(metric=node.name or "", labels=around | matched)
    elif isinstance(node, promql_parser.MatrixSelector):
        yield from _named(node.vector_selector, around)
    elif isinstance(node, promql_parser.AggregateExpr):
        by = frozenset(node.modifier.labels) if node.modifier is not None else frozenset()
        yield from _named(node.expr, around | by)
    elif isinstance(node, promql_parser.BinaryExpr):
        on = node.modifier.matching.labels if node.modifier is not None and node.modifier.matching is not None else ()
        for side in (node.lhs, node.rhs):
            yield from _named(side, frozenset(on))
    elif isinstance(node, promql_parser.Call):
        for part in node.args:
            yield from _named(part, around)
    elif isinstance(node, promql_parser.ParenExpr | promql_parser.SubqueryExpr | promql_parser.UnaryExpr):
        yield from _named(node.expr, around)

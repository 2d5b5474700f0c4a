"""PromQL in the few shapes that the dashboards need, so that a panel names a metric and what to split it by.

Rates are taken over `$__rate_interval`, which Grafana makes long enough for the scrape interval.
"""

from collections.abc import Callable, Mapping

WORKER = 'model=~"$model",worker=~"$worker"'
GROUP = f'{WORKER},group=~"$group"'
ROUTER = 'model=~"$model",router=~"$router"'
PLACED = f'{ROUTER},worker=~"$worker"'  # router series of one worker
API = 'endpoint=~"/v1/.*"'  # what clients ask for: neither health checks nor scrapes


Series = Mapping[str, str]  # Grafana's template of a series' name -> its query


def total(metric: str, labels: str, *by: str) -> str:
    """A gauge, summed."""
    return f"sum{_by(by)} ({metric}{{{labels}}})"


def rate(metric: str, labels: str, *by: str) -> str:
    """A counter's increase per second, summed."""
    return f"sum{_by(by)} (rate({metric}{{{labels}}}[$__rate_interval]))"


def increase(metric: str, labels: str, *by: str) -> str:
    """How much a counter went up in the dashboard's time range, summed."""
    return f"sum{_by(by)} (increase({metric}{{{labels}}}[$__range]))"


def seen(metric: str, labels: str, *by: str) -> str:
    """A gauge that every router tells alike: each model's once, not once a router."""
    each = f"max by ({', '.join(('model', *by))}) ({metric}{{{labels}}})"
    return f"sum{_by(by)} ({each})"


def split(function: Callable[..., str], metric: str, labels: str, *by: str) -> Series:
    """A series for each value of the labels `by`, with these values as its name; `function` is one of the above."""
    return {" ".join(f"{{{{{label}}}}}" for label in by): function(metric, labels, *by)}


def happening(expr: str) -> str:
    """Without the series that are zero: a legend names what there is, not everything that there could be."""
    return f"{expr} > 0"


def ratio(part: str, whole: str, *by: str) -> str:
    """A share; no value while the whole is zero."""
    on = f" on ({', '.join(by)})" if by else ""
    return f"{part} /{on} ({whole} > 0)"


def rates_ratio(part: str, whole: str, labels: str, *by: str) -> str:
    """The rate of one counter over that of another, which have the same labels."""
    return ratio(rate(part, labels, *by), rate(whole, labels, *by), *by)


def totals_ratio(part: str, whole: str, labels: str, *by: str) -> str:
    """One gauge over another, which have the same labels."""
    return ratio(total(part, labels, *by), total(whole, labels, *by), *by)


def each_of(parts: str, whole: str) -> str:
    """Every one of the parts over one whole; no value while the whole is zero."""
    return f"{parts} / on () group_left () ({whole} > 0)"


def buckets(metric: str, labels: str) -> str:
    """A histogram's new observations by bucket, for a heat map."""
    return f"sum by (le) (increase({metric}_bucket{{{labels}}}[$__rate_interval]))"


def quantile(share: float, metric: str, labels: str, *by: str) -> str:
    """A histogram's quantile over what was observed lately; no value while nothing was."""
    rates = f"sum by ({', '.join((*by, 'le'))}) (rate({metric}_bucket{{{labels}}}[$__rate_interval]))"
    return f"histogram_quantile({share}, {rates})"


def mean(metric: str, labels: str, *by: str) -> str:
    """A histogram's mean over what was observed lately; no value while nothing was."""
    return rates_ratio(f"{metric}_sum", f"{metric}_count", labels, *by)


def quantiles(metric: str, labels: str, *percents: int) -> Series:
    """The quantiles of these percents; median, p95 and p99 if none is given."""
    return {f"p{percent}": quantile(percent / 100, metric, labels) for percent in percents or (50, 95, 99)}


def or_zero(expr: str) -> str:
    """A value that is zero where no series is: right only where nothing means none (no event yet, no worker that has any)."""
    return f"{expr} or vector(0)"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""

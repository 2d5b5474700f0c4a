"""Merges the Prometheus pages of several processes into one page: each metric family once, with the samples of every page.

- **family**: a metric with all its series. Its **head** is the comment lines `# HELP`, `# TYPE` and, in OpenMetrics, `# UNIT`.

A page is split into its families, and one regular expression checks a whole family at once, so that a page of thousands of lines
takes little more time than copying its bytes. A family that is not valid is left out, so that the merged page is valid even if
a worker's page is not. For example, the pages of two workers

    # HELP x_total X.            # HELP x_total X.
    # TYPE x_total counter       # TYPE x_total counter
    x_total{worker="0"} 1        x_total{worker="1"} 2

become one family with two samples.
"""

import functools
import re
from collections.abc import Iterable, Iterator

OPENMETRICS_END = "# EOF\n"
_HELP = "\n# HELP "
_HEAD = re.compile(r"# HELP ([a-zA-Z_:][\w:]*) [^\n]*\n# TYPE \1 ([a-z]+)\n(?:# UNIT \1 [\w:]+\n)?")
_VALUE = r"(?:[-+]?\d[\d.eE+-]*|NaN|[-+]Inf)"
_LABEL = r'[a-zA-Z_]\w*+="[^"\\\n]*+(?:\\[^\n][^"\\\n]*+)*+"'
_LABELS = rf"\{{(?:{_LABEL}(?:,{_LABEL})*+)?\}}"
_REST = rf"(?: {_VALUE})?(?: # {_LABELS} {_VALUE}(?: {_VALUE})?)?"  # an optional timestamp and an optional exemplar
_ENDS = {  # type of a family -> pattern of what its samples' names have after the family's name
    "counter": "_(?:total|created)",  # in the text format the family's name itself ends in `_total`
    "gauge": "",
    "untyped": "",
    "unknown": "",
    "info": "_info",
    "histogram": "_(?:bucket|count|sum|created)",
    "summary": "(?:_count|_sum|_created)?",
}


def merge_pages(pages: Iterable[str], *, openmetrics: bool = False) -> str:
    """Merge pages of one format into one valid page. A family's head is taken from the first page that has the family."""
    merged: dict[str, list[str]] = {}  # name -> head, samples of each page
    for page in pages:
        for head, samples in _families(page, openmetrics=openmetrics):
            name, kind = _name_and_type(head)
            end = "" if kind == "counter" and not openmetrics else _ENDS.get(kind)
            if end is None or not _lines_of(name + end).fullmatch(samples):
                continue
            parts = merged.setdefault(name, [head])
            if kind == _name_and_type(parts[0])[1]:
                parts.append(samples)
    text = "".join(part for parts in merged.values() for part in parts)
    return text + OPENMETRICS_END if openmetrics else text


def _families(page: str, *, openmetrics: bool) -> Iterator[tuple[str, str]]:
    """Yield each family of a page as its head and its samples, without the last family of a page that was cut off in transfer."""
    whole = page.removesuffix(OPENMETRICS_END)
    families = ("\n" + whole.removesuffix("\n")).split(_HELP)[1:]
    is_cut = whole == page if openmetrics else not page.endswith("\n")
    for family in families[:-1] if is_cut else families:
        text = f"# HELP {family}\n"
        end = 0
        while text.startswith("# ", end):
            end = text.index("\n", end) + 1
        yield text[:end], text[end:]


@functools.lru_cache(maxsize=4096)
def _name_and_type(head: str) -> tuple[str, str]:
    """Return a family's name and type, or two empty strings if the head is not valid."""
    match = _HEAD.fullmatch(head)
    return (match[1], match[2]) if match else ("", "")


@functools.lru_cache(maxsize=1024)
def _lines_of(name: str) -> re.Pattern[str]:
    """Return a pattern for any number of samples whose names match the pattern `name`."""
    return re.compile(rf"(?:{name}(?:{_LABELS})? {_VALUE}{_REST}\n)*+")

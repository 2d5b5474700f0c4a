"""Several Prometheus pages as one: each family once, with the samples of every page.

A page is cut at its families and each family is checked as a whole, by one regular expression: a page of thousands of lines
costs little more than its bytes. What is not right is left out by family, so that the union is valid whatever a worker sent.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator

OPENMETRICS_END = "# EOF\n"
_HELP = "\n# HELP "
_HEAD = re.compile(r"# HELP ([a-zA-Z_:][\w:]*) [^\n]*\n# TYPE \1 ([a-z]+)\n(?:# UNIT \1 [\w:]+\n)?")
_VALUE = r"(?:[-+]?\d[\d.eE+-]*|NaN|[-+]Inf)"
_LABEL = r'[a-zA-Z_]\w*+="[^"\\\n]*+(?:\\[^\n][^"\\\n]*+)*+"'
_LABELS = rf"\{{(?:{_LABEL}(?:,{_LABEL})*+)?\}}"
_REST = rf"(?: {_VALUE})?(?: # {_LABELS} {_VALUE}(?: {_VALUE})?)?"  # a time, an exemplar
_ENDS = {  # of the samples' names, by the family's type
    "counter": "_(?:total|created)",  # the name of the family itself in plain text
    "gauge": "",
    "untyped": "",
    "unknown": "",
    "info": "_info",
    "histogram": "_(?:bucket|count|sum|created)",
    "summary": "(?:_count|_sum|_created)?",
}


def merge_pages(pages: Iterable[str], *, openmetrics: bool = False) -> str:
    """Pages of one format as one valid page of it. A family's head is that of the first page that has it."""
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
    """A page's families as comment lines and samples. The last one of a page that was cut is not whole, and is left out."""
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
    """Both empty where the comment lines are not a family's."""
    match = _HEAD.fullmatch(head)
    return (match[1], match[2]) if match else ("", "")


@functools.lru_cache(maxsize=1024)
def _lines_of(name: str) -> re.Pattern[str]:
    """Any number of samples whose names match the pattern `name`."""
    return re.compile(rf"(?:{name}(?:{_LABELS})? {_VALUE}{_REST}\n)*+")

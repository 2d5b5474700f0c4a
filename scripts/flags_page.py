#!/usr/bin/env python3
"""Write docs/flags.md: every setting of Transom, read from `Settings`, so that the page cannot contradict the code.

`make docs` runs it; a test fails while the page is out of date.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from transom_core.settings.settings import SECTIONS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "flags.md"
INTRODUCTION = """# Flags

`transom serve MODEL` takes them as flags, `LLM(...)` takes those of the engine as keywords (`max_model_len=4096`), and the
Serve YAML takes them under `args:` (`max_model_len: 4096`). A setting that is on by default has a flag that turns it off:
`--no-enable-prefix-caching`. [Setups](setups.md) says which to begin with, and [coming from vLLM](from_vllm.md) what differs
from `vllm serve`. `make docs` writes this page from the code.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())
    print(f"{PAGE.relative_to(ROOT)} is written.")


def page() -> str:
    """The whole page: a table for each section."""
    return "\n".join([INTRODUCTION, *(_table(f"## {title}", part.model_fields) for title, part in SECTIONS.items())])


def _table(title: str, settings: Mapping[str, FieldInfo]) -> str:
    rows = [
        f"| {_flag(name)} | {_default(field)} | {_values(name, field)} | {field.description} |"
        for name, field in settings.items()
    ]
    return "\n".join([title, "", "| flag | default | values | meaning |", "|---|---|---|---|", *rows, ""])


def _flag(name: str) -> str:
    return "`MODEL`" if name == "model" else f"`--{name.replace('_', '-')}`"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default in (None, (), ""):
        return "unset"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if isinstance(field.default, int) and field.default >= 2**30:
        return f"`{field.default >> 30}GiB`"
    return f"`{field.default}`"


def _values(name: str, field: FieldInfo) -> str:
    """The choices, or the kind of value and its limits."""
    annotation: Any = field.annotation
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)] or [annotation]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "text, repeatable"
    if name in ("kv_cache_memory_bytes", "disk_space"):
        return "bytes, or `512MiB`"
    if name == "swap_space":
        return "GiB, or `512MiB`"
    words = {int: "integer", float: "number", str: "text", bool: ""}[kinds[0]]  # a switch's default tells its values
    return " ".join(text for constraint in field.metadata for text in _limits(constraint)) or words


def _limits(constraint: Any) -> Iterator[str]:
    for name, word in (("ge", "from"), ("gt", "above"), ("le", "to")):
        if (limit := getattr(constraint, name, None)) is not None:
            yield f"{word} {limit}"


if __name__ == "__main__":
    main()

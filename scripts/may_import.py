"""An import-linter contract that is the design's table "who may import whom": what a row does not name is forbidden.

Each line of `table` is `module: name name late:name`. The longest matching row decides for a module (a component may end
in `*`), and a row that ends in `**` adds to what every module under it may import. A module without a row breaks the
contract, so that new code is placed on purpose. A module may always import the standard library and what lies under its
own row; a name stands for everything under it; `late:` allows an import only inside a function, where it costs nothing
until it is needed, or under `if TYPE_CHECKING:`, where it never runs.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TypeGuard

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    pattern: tuple[str, ...]
    allowed: tuple[str, ...]
    late: tuple[str, ...]

    @classmethod
    def parse(cls, line: str) -> Row:
        """Read `module: name late:name`; ValueError without a colon."""
        module, colon, names = line.partition(":")
        if not colon:
            raise ValueError(f"a row of the import table is {line!r}; write 'module: name name late:name'")
        late = tuple(name.removeprefix("late:") for name in names.split() if name.startswith("late:"))
        allowed = tuple(name for name in names.split() if not name.startswith("late:"))
        return cls(pattern=tuple(module.strip().split(".")), allowed=allowed, late=late)

    def matches(self, module: str) -> bool:
        """Whether the row speaks for the module. A row without a dot is a root package's `__init__` alone."""
        parts = module.split(".")
        if len(self.pattern) == 1:
            return parts == list(self.pattern)
        fits = all(fnmatchcase(part, pattern) for part, pattern in zip(parts, self.pattern, strict=False))
        return len(parts) >= len(self.pattern) and fits

    @property
    def adds(self) -> bool:
        """Whether the row adds to every module's own row, instead of being one."""
        return self.pattern[-1] == "**"

    @property
    def rank(self) -> tuple[int, int]:
        """Longer rows win, then those that spell out more."""
        return len(self.pattern), sum(len(part.rstrip("*")) for part in self.pattern)

    def own(self, module: str) -> str:
        """The module's prefix that the row matched."""
        return ".".join(module.split(".")[: len(self.pattern)])


class MayImportContract(Contract):
    """See the module's docstring."""

    type_name = "may_import"

    table = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Collect the problems of every module of the project."""
        rows = [Row.parse(line) for line in self.table]  # type: ignore[attr-defined]
        modules = sorted(name for name in graph.modules if not graph.is_module_squashed(name))
        problems = [problem for module in modules for problem in problems_of(graph, module, rows)]
        unused = [row for row in rows if not any(row.matches(module) for module in modules)]
        problems += [f"the row for {'.'.join(row.pattern)} matches no module; remove or rename it" for row in unused]
        return ContractCheck(kept=not problems, metadata={"problems": problems})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """One line a problem."""
        for problem in check.metadata["problems"]:
            output.print_error(f"- {problem}", bold=False)


def problems_of(graph: ImportGraph, module: str, rows: list[Row]) -> Iterator[str]:
    """What one module imports against its row."""
    row = max((row for row in rows if row.matches(module) and not row.adds), key=lambda row: row.rank, default=None)
    if row is None:
        yield f"{module} has no row in the import table"
        return
    allowed = [
        name for other in rows if other is row or (other.adds and other.matches(module)) for name in other.allowed
    ]
    for imported in sorted(graph.find_modules_directly_imported_by(module)):
        if imported in sys.stdlib_module_names or is_under(imported, [row.own(module), *allowed]):
            continue
        lines = sorted(detail["line_number"] for detail in graph.get_import_details(importer=module, imported=imported))
        if not is_under(imported, row.late):
            yield f"{module} may not import {imported} (line {', '.join(map(str, lines))})"
        elif early := [line for line in lines if not is_late(module, line)]:
            yield f"{module} may import {imported} only inside a function (line {', '.join(map(str, early))})"


def is_under(module: str, names: Sequence[str]) -> bool:
    """Whether the module is one of the names or below one."""
    return any(module == name or module.startswith(name + ".") for name in names)


def is_late(module: str, line: int) -> bool:
    """Whether the line lies in a function's body or under `if TYPE_CHECKING:`."""
    return any(start <= line <= end for start, end in late_spans(module))


@cache
def late_spans(module: str) -> tuple[tuple[int, int], ...]:
    """First and last line of every function and of every `if TYPE_CHECKING:` block of a module."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    spans = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_typing(node)
    )
    return tuple((node.lineno, node.end_lineno or node.lineno) for node in spans)


def is_typing(node: ast.AST) -> TypeGuard[ast.If]:
    """Whether a statement is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"

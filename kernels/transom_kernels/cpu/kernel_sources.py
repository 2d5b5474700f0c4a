"""Finds the source files that a kernel is compiled from. The kernel's cache key covers only these, so edits elsewhere recompile
nothing.

A kernel's module imports what the kernel's code calls. The files are those of this module, of the modules that it imports, of those
that they import, and so on, within its package and `transom_kernels`. The search imports no module; it looks in the text of each
file for `from module import name`, on one line or with names in parentheses.
"""

import hashlib
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

# The search leaves out the modules that run kernels: none of their code is compiled into a kernel. A kernel's file imports them if
# it contains the launcher, too.
_RUNTIME = {"transom_kernels.launch"} | {
    f"transom_kernels.cpu.{name}"
    for name in ("kernel", "kernel_sources", "launching", "memory", "pool", "program", "recording", "threads")
}

_IMPORT = re.compile(r"^ *from ([\w.]+) import (\([^)]*\)|.*)", re.MULTILINE)


def sources_digest(module: str) -> str:
    """Return a digest of the files that a kernel in this module is compiled from."""
    digest = hashlib.sha256()
    for name in sorted(used_modules(module)):
        digest.update(name.encode() + b"\0" + _read(name).source + b"\0")
    return digest.hexdigest()


def used_modules(module: str) -> set[str]:
    """Return the module and those that it imports, directly or through others."""
    found: set[str] = set()
    pending = [module]
    while pending:
        name = pending.pop()
        if name not in found and name not in _RUNTIME:
            found.add(name)
            pending.extend(_read(name).imported)
    return found


class _Module(NamedTuple):
    source: bytes
    imported: list[str]  # modules of `transom_kernels` and of the module's own package


@cache
def _read(module: str) -> _Module:
    path = _file(module)
    if path is None:
        raise ModuleNotFoundError(f"No file has the source of {module}.", name=module)
    source = path.read_bytes()
    names: list[str] = []
    for origin, given in _IMPORT.findall(source.decode()):
        # a name that is imported from a package may be a module
        names.extend((origin, *(f"{origin}.{name}" for name in re.findall(r"\w+", given))))
    packages = {"transom_kernels", module.partition(".")[0]}
    return _Module(source, [name for name in names if name.partition(".")[0] in packages and _file(name) is not None])


@cache
def _file(module: str) -> Path | None:
    """Return the file of a module, or of a package's `__init__`; None if neither exists."""
    package, *parts = module.split(".")
    spec = find_spec(package)
    for folder in [] if spec is None else spec.submodule_search_locations or ():
        path = Path(folder, *parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None

"""Versions of Transom, Python and other packages, as `/metrics` shows them."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version


def build_versions(*packages: str) -> dict[str, str]:
    """Versions of Transom (as `version`), Python and `packages`, by name; "" for a package that is not installed. Imports none."""
    found = {"version": _version("transom"), "python": platform.python_version()}
    return found | {package: _version(package) for package in packages}


@cache
def _version(package: str) -> str:
    """Of an installed package; "" of one that is not. Reading it takes milliseconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

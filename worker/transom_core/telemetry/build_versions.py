"""Versions of Transom, Python and other packages, as `/metrics` shows them."""

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version


def build_versions(*packages: str) -> dict[str, str]:
    """Return the versions of Transom (as `version`), Python and `packages`, without importing them; "" for one that is not
    installed."""
    found = {"version": _version("transom"), "python": platform.python_version()}
    return found | {package: _version(package) for package in packages}


@cache
def _version(package: str) -> str:
    """Return a package's version; "" if it is not installed. Cached, since reading it takes milliseconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

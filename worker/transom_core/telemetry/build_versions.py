"""Versions of Transom, Python and other packages, as `/metrics` shows them."""

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from prometheus_client.core import Metric

from transom_core.telemetry.own_labels import OwnLabels


def build_versions(*packages: str) -> dict[str, str]:
    """Return the versions of Transom (as `version`), Python and `packages`, without importing them; "" for one that is not
    installed."""
    found = {"version": _version("transom"), "python": platform.python_version()}
    return found | {package: _version(package) for package in packages}


def build_info(own: OwnLabels, versions: dict[str, str]) -> Metric:
    """Return the info family of a process's `versions`."""
    text = "Versions of Transom, Python and libraries; the value is always 1."
    return own.gauges("transom_build_info", text, tuple(versions), [(tuple(versions.values()), 1)])


@cache
def _version(package: str) -> str:
    """Return a package's version; "" if it is not installed. Cached, since reading it takes milliseconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

"""Gives the path by which a request finds its route. Code that decides by path (keys, metrics, spans) must use this path, too."""

from __future__ import annotations

from starlette.types import Scope


def routed_path(scope: Scope) -> str:
    """A request's path as the patterns of routes see it.

    It excludes the prefix at which the app is mounted (Ray Serve's `route_prefix`), and a line feed at the end: patterns end in
    `$`, which also matches in front of a final line feed.
    """
    path: str = scope["path"]
    inside = path.removeprefix(scope.get("root_path", ""))
    return (inside if inside.startswith("/") else path).removesuffix("\n")

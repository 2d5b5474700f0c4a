"""The path by which a request finds its route. Whoever decides by a path has to see the same one."""

from __future__ import annotations

from starlette.types import Scope


def routed_path(scope: Scope) -> str:
    """A request's path as its route's pattern sees it.

    The prefix that the app is mounted at (`route_prefix` of Ray Serve) is no part of it, nor is a line feed at its end: patterns
    end in `$`, which matches in front of one, too.
    """
    path: str = scope["path"]
    inside = path.removeprefix(scope.get("root_path", ""))
    return (inside if inside.startswith("/") else path).removesuffix("\n")

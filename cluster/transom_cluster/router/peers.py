"""The seam between routers: what one asks the others when a client wants to know something of the whole."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

PEER_METHODS = frozenset({"metrics_text", "process_name", "process_page", "request_timeline", "request_lines"})
"""What routers may ask each other: methods of `Router` that only look."""


class RouterPeers(Protocol):
    """The other routers of the application, as seen from one."""

    async def ask_others(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call a method of `Router` (of `PEER_METHODS`) on every other router; one entry each, an exception where one failed or was
        too late. Those that are being stopped are not asked. Never raises, and takes little longer than `timeout_s`."""


class NoPeers:
    """For a router that is alone."""

    async def ask_others(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """See `RouterPeers`: there are none."""
        return []


async def answer_peer(router: Any, asker_id: str, method: str, args: tuple[Any, ...]) -> tuple[str, Any]:
    """The other side of `ask_others`: this router's id, and its answer; None instead of an answer to itself.

    Raises:
        ValueError: the method is not one that routers may ask each other.
    """
    if method not in PEER_METHODS:
        raise ValueError(f"Routers do not ask each other for {method!r}; it must be one of {sorted(PEER_METHODS)}.")
    if asker_id == router.router_id:
        return router.router_id, None
    answer = getattr(router, method)(*args)
    return router.router_id, (await answer) if inspect.isawaitable(answer) else answer

"""The seam between routers: what one asks the others when a client wants to know something of the whole."""

from __future__ import annotations

from typing import Any, Protocol


class RouterPeers(Protocol):
    """The other routers of the application, as seen from one."""

    async def ask_others(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call a method of `Router` on every other router; one entry each, an exception where one failed or was too late."""


class NoPeers:
    """For a router that is alone."""

    async def ask_others(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """See `RouterPeers`: there are none."""
        return []

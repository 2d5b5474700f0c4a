"""`VirtualTime`: how much each client has had of something that clients share by turns, for its weight.

The client with the least *service* is next, and the service of the client whose turn it was last is *now*. A client that comes
back after a pause starts at `now`, so that a pause saves up no claims. What it had beyond that stays on its account, so that it is
no use to leave and come back. Start-time fair queueing (Goyal et al. 1996) and the virtual token counter ("Fairness in Serving
Large Language Models", Sheng et al. 2024) keep these accounts.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_REMEMBERED = 1024  # clients without requests that have had more than those that wait


class VirtualTime:
    """The accounts of clients. Whoever uses it keeps the service of clients with requests."""

    def __init__(self) -> None:
        self.now = 0.0
        self._remembered: OrderedDict[str, float] = OrderedDict()  # client -> service beyond `now`, the oldest first

    def join(self, client: str) -> float:
        """Return the service with which a client begins that had no request."""
        return max(self.now, self._remembered.pop(client, 0.0))

    def take_turn(self, service: float) -> None:
        """Note that it is the turn of a client with this service."""
        self.now = max(self.now, service)

    def leave(self, client: str, service: float) -> None:
        """Note with which service a client has no request any more."""
        if service > self.now:
            self._remembered[client] = service
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)

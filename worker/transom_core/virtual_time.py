"""`VirtualTime`: accounts of how much service each client has had, divided by its weight, of a resource that clients use in turns.

The next turn is that of the client with the least *service*; *now* is the service of the client that had the last turn. A client
that returns after a pause starts at `now`, so a pause earns no credit. Service beyond `now` stays on its account, so leaving and
returning clears no debt. Start-time fair queueing (Goyal et al. 1996) and the virtual token counter ("Fairness in Serving Large
Language Models", Sheng et al. 2024) keep these accounts.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_REMEMBERED = 1024  # clients without requests whose service is beyond `now`


class VirtualTime:
    """Has `now` and the accounts of clients without requests; the user of this class keeps the service of clients with requests."""

    def __init__(self) -> None:
        self.now = 0.0
        self._remembered: OrderedDict[str, float] = OrderedDict()  # client -> service beyond `now`, the oldest first

    def join(self, client: str) -> float:
        """Return the service with which a client begins that has had no request until now."""
        return max(self.now, self._remembered.pop(client, 0.0))

    def take_turn(self, service: float) -> None:
        """Note that a client with this service has the turn."""
        self.now = max(self.now, service)

    def leave(self, client: str, service: float) -> None:
        """Note that a client has no request any more, and the service that it has had."""
        if service > self.now:
            self._remembered[client] = service
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)

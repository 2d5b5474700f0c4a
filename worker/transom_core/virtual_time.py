"""`VirtualTime`: lets clients use a resource in fair turns. Each client has an account of its *service*: how much of the resource
it has used, divided by its weight.

The client with the least service has the next turn; *now* is the service of the client that had the last turn. A client
that returns after a pause starts at `now`, so a pause earns no credit. Service beyond `now` stays on its account, so leaving and
returning clears no debt. Start-time fair queueing (Goyal et al. 1996) and the virtual token counter ("Fairness in Serving Large
Language Models", Sheng et al. 2024) keep these accounts.
"""

from heapq import nlargest

MAX_ACCOUNTS = 1024  # with more accounts, the smaller ones are forgotten; their clients start as after a pause


class VirtualTime:
    """Has `now` and the accounts of clients. While a client has requests, the user of this class may keep its service instead.

    service = time.account(client)                  a client's first request comes
    time.take_turn(service)                         the client with the least service has its turn
    time.remember(client, service + cost / weight)
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._accounts: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def own_account(self, client: str) -> float:
        """Return the service that a client itself has had; 0 if it is not known."""
        return self._accounts.get(client, 0.0)

    def account(self, client: str) -> float:
        """Return the service with which a client begins when it has its first request after a pause: at least `now`."""
        return max(self.now, self.own_account(client))

    def take_turn(self, service: float) -> None:
        """Note that a client with this service has the turn."""
        self.now = max(self.now, service)

    def remember(self, client: str, service: float) -> None:
        """Note the service that a client has had."""
        self._accounts[client] = service
        if len(self._accounts) > MAX_ACCOUNTS:
            most = nlargest(MAX_ACCOUNTS // 2, self._accounts.items(), key=lambda account: account[1])
            self._accounts = {name: known for name, known in most if known > self.now}

"""Defines the interface of a launcher, which starts the processes of a worker's ranks, reports the end of each, and kills them all.

launcher.launch(setups, on_exit)     once; `on_exit` is called for each process that ends by itself
launcher.kill()
launcher.close()
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from transom_core.errors import LossCause
from transom_worker.execution.ranks.messages import RankSetup


class RankExit(NamedTuple):
    """How a rank's process ended: in words for people, and as a cause."""

    how: str
    cause: LossCause


# Called with the rank and with how its process ended; None if it ended normally, after it had reported a reason.
OnRankExit = Callable[[int, RankExit | None], None]


class Launcher(ABC):
    """Owns the processes of one start. A launcher launches once; the executor makes a new launcher to start the ranks again."""

    @property
    @abstractmethod
    def ip(self) -> str | None:
        """Return the address at which ranks reach this process over the network; None if all ranks are on this host."""

    @abstractmethod
    def launch(self, setups: Sequence[RankSetup], on_exit: OnRankExit) -> None:
        """Start every rank's process.

        The launcher calls `on_exit`, on a thread of its own, when a process ends that `kill` did not end.

        Raises:
            RankLost: a process cannot be started.  ConfigError: the host or the placement group has too few devices or bundles.
        """

    @abstractmethod
    def kill(self) -> None:
        """Kill all processes at once, even if they are busy; idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Wait until the killed processes are gone, and free the launcher's resources; idempotent."""

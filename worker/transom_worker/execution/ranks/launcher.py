"""Who starts the processes of a worker's ranks, notices when one ends, and ends all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from transom_worker.execution.ranks.messages import RankSetup

OnRankExit = Callable[[int, str | None], None]  # rank, and how it ended; None: in good order, having said why


class Launcher(ABC):
    """The processes of one start. A launcher launches once; to start ranks again there is another one."""

    @property
    @abstractmethod
    def ip(self) -> str | None:
        """This process's address as ranks reach it over the network; None where all of them are on this host."""

    @abstractmethod
    def launch(self, setups: Sequence[RankSetup], on_end: OnRankExit) -> None:
        """Start every rank's process.

        `on_end` is called on a thread of the launcher's when a process ends that `kill` did not.

        Raises:
            RankLost: a process cannot be started.  ConfigError: there is not room for all of them.
        """

    @abstractmethod
    def kill(self) -> None:
        """End all processes at once, whatever they do; idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Wait until the killed processes are gone, and free what was taken for them; idempotent."""

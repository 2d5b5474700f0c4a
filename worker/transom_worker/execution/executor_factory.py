"""Creates the executor that a config asks for, and imports only the modules of that executor."""

from transom_core.config import EngineConfig
from transom_worker.execution.executor import Executor


def create_executor(config: EngineConfig) -> Executor:
    """Return the executor for a config: one rank in this process, or several in processes or Ray actors."""
    if config.ranks.size == 1:
        from transom_worker.execution.local_executor import LocalExecutor

        return LocalExecutor(config)
    from transom_worker.execution.ranks.ranks_executor import RanksExecutor

    if config.ranks.launcher == "ray":
        from transom_worker.execution.ranks.actor_launcher import RankActors

        return RanksExecutor(config, RankActors)
    from transom_worker.execution.ranks.process_launcher import RankProcesses

    return RanksExecutor(config, RankProcesses)

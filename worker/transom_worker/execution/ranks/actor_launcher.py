"""Launches ranks as Ray actors in the placement group of this process. This process runs in bundle 0, and rank i in bundle i + 1.

Ray ends the actors when this process ends, for any reason.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_current_placement_group, get_node_ip_address
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from transom_core.config import EngineConfig
from transom_core.errors import ConfigError
from transom_core.settings.gpu_grant import with_grant
from transom_worker.execution.ranks.launcher import Launcher, OnRankExit, RankExit
from transom_worker.execution.ranks.messages import RankSetup

KILL_TIMEOUT_S = 10.0
# How often the watching thread checks whether `kill` was called; it notices an actor's end at once.
POLL_PERIOD_S = 0.5
NODE_DIED = "its node has died"  # part of Ray's message about an actor whose host is gone


class RankActor:
    """The Ray actor in whose process one rank runs."""

    def run(self, setup: RankSetup) -> None:
        """Run the rank. Returns only after the rank has failed and has reported the reason to the executor, which kills it then."""
        from transom_worker.execution.ranks.rank_main import run_rank

        run_rank(setup, ip=get_node_ip_address())
        # Ray may never deliver its kill to a process that was stopped meanwhile.
        end = threading.Timer(2 * KILL_TIMEOUT_S, os._exit, (1,))
        end.daemon = True
        end.start()


class RankActors(Launcher):
    """Launches one actor for each rank, with the resources of the rank's bundle."""

    def __init__(self) -> None:
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self._killed = threading.Event()

    @property
    def ip(self) -> str | None:
        """Return the address of this node, because ranks may run on other nodes."""
        return str(get_node_ip_address())

    def launch(self, setups: Sequence[RankSetup], on_exit: OnRankExit) -> None:
        """Start every rank's actor. Raises ConfigError if this process runs in no placement group with a bundle for each
        rank, or if a bundle does not have the GPU that its rank needs."""
        group = _placement_group(len(setups))
        setups = [replace(setup, config=_with_bundle(setup, group.bundle_specs[1 + setup.rank])) for setup in setups]
        for setup in setups:
            self._actors.append(_create(group, 1 + setup.rank))
        self._runs = [actor.run.remote(setup) for actor, setup in zip(self._actors, setups, strict=True)]
        threading.Thread(target=self._watch, args=(on_exit,), name="transom-ranks", daemon=True).start()

    def kill(self) -> None:
        """Kill all actors."""
        self._killed.set()
        for actor in self._actors:
            ray.kill(actor)

    def close(self) -> None:
        """Wait until all actors are gone."""
        if self._runs:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=KILL_TIMEOUT_S)
        self._actors, self._runs = [], []

    def _watch(self, on_exit: OnRankExit) -> None:
        """Wait for the end of each actor's `run`, and report it, until the launcher kills the actors."""
        running = {run_ref: rank for rank, run_ref in enumerate(self._runs)}
        while running and not self._killed.is_set():
            ended, _ = ray.wait(list(running), timeout=POLL_PERIOD_S)
            for run_ref in ended:
                rank = running.pop(run_ref)
                if not self._killed.is_set():
                    on_exit(rank, _rank_exit(run_ref))


def _placement_group(num_ranks: int) -> PlacementGroup:
    """Return the placement group that this process runs in. Raises ConfigError if there is none, or if it does not have exactly one
    bundle for each rank and one for this process."""
    group = get_current_placement_group()
    if group is None or group.bundle_count != num_ranks + 1:
        found = (
            "runs in no placement group" if group is None else f"has a placement group of {group.bundle_count} bundles"
        )
        raise ConfigError(
            f"The worker {found}; {num_ranks} ranks as Ray actors need {num_ranks + 1} bundles, of which the first is the "
            f"worker's own. Start it with `transom serve`, or give its actor such a group."
        )
    return group


def _with_bundle(setup: RankSetup, bundle: dict[str, float]) -> EngineConfig:
    """Return the config of a rank with the resources of its bundle. Raises ConfigError if it cannot compute with them."""
    try:
        return with_grant(setup.config, bundle.get("GPU", 0.0))
    except ConfigError as error:
        raise ConfigError(f"Bundle {1 + setup.rank} of the worker's placement group: {error}") from None


def _create(group: PlacementGroup, bundle: int) -> Any:
    """Create the actor of a rank. It inherits this process's runtime environment, and so its OpenMP variables."""
    resources = group.bundle_specs[bundle]
    options = {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "max_restarts": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    }
    return ray.remote(RankActor).options(**options).remote()


def _rank_exit(run_ref: Any) -> RankExit | None:
    """Wait for an actor's `run`, and return how the actor ended; None if `run` returned, because the rank has reported why."""
    try:
        ray.get(run_ref)
    except RayError as error:
        words = " ".join(str(error).split())
        return RankExit(f"its actor ended: {words}", "host_lost" if NODE_DIED in words else "unknown")
    return None

"""Ranks as Ray actors, placed by the placement group that this process runs in: bundle i + 1 for rank i, bundle 0 is its own.

Ray ends the actors when this process ends, however that comes about.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_current_placement_group, get_node_ip_address
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from transom_worker.errors import ConfigError
from transom_worker.execution.ranks.launcher import Launcher, OnRankExit
from transom_worker.execution.ranks.messages import RankSetup

KILL_TIMEOUT_S = 10.0
LOOK_PERIOD_S = 0.5  # between looks at whether anybody still wants to know; an end is seen at once


class RankActor:
    """One rank's process."""

    def live(self, setup: RankSetup) -> None:
        """The whole life of a rank; returns when it cannot go on, and has told the executor why."""
        from transom_worker.execution.ranks.rank_main import run_rank

        run_rank(setup, ip=get_node_ip_address())


class RankActors(Launcher):
    """One actor a rank, each with the resources of its bundle."""

    def __init__(self) -> None:
        self._actors: list[Any] = []
        self._lives: list[Any] = []
        self._killed = threading.Event()

    @property
    def ip(self) -> str | None:
        """Ranks may be on other nodes."""
        return str(get_node_ip_address())

    def launch(self, setups: Sequence[RankSetup], on_end: OnRankExit) -> None:
        """Start every rank's actor. Raises ConfigError where this process runs in no placement group with a bundle for each."""
        group = _placement(len(setups))
        for setup in setups:
            self._actors.append(_create(group, 1 + setup.rank))
        self._lives = [actor.live.remote(setup) for actor, setup in zip(self._actors, setups, strict=True)]
        threading.Thread(target=self._watch, args=(on_end,), name="transom-ranks", daemon=True).start()

    def kill(self) -> None:
        """End all actors."""
        self._killed.set()
        for actor in self._actors:
            ray.kill(actor)

    def close(self) -> None:
        """Wait until they are gone."""
        if self._lives:
            ray.wait(self._lives, num_returns=len(self._lives), timeout=KILL_TIMEOUT_S)
        self._actors, self._lives = [], []

    def _watch(self, on_end: OnRankExit) -> None:
        running = {life: rank for rank, life in enumerate(self._lives)}
        while running and not self._killed.is_set():
            ended, _ = ray.wait(list(running), timeout=LOOK_PERIOD_S)
            for life in ended:
                rank = running.pop(life)
                if not self._killed.is_set():
                    on_end(rank, _how_it_ended(life))


def _placement(num_ranks: int) -> PlacementGroup:
    """The group that this process runs in."""
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


def _create(group: PlacementGroup, bundle: int) -> Any:
    resources = group.bundle_specs[bundle]
    options = {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "max_restarts": 0,
        "runtime_env": {"env_vars": {"OMP_WAIT_POLICY": "PASSIVE"}},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    }
    return ray.remote(RankActor).options(**options).remote()


def _how_it_ended(life: Any) -> str | None:
    try:
        ray.get(life)
    except RayError as error:
        return f"its actor ended: {' '.join(str(error).split())}"
    return None

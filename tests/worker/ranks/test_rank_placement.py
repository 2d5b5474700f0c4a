"""Ranks as Ray actors ask for a placement group with a bundle for each, and for the worker's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from transom_core.errors import ConfigError
from transom_core.settings.settings import Settings
from transom_worker.execution.ranks import actor_launcher
from transom_worker.execution.ranks.actor_launcher import RankActors
from transom_worker.execution.ranks.messages import RankSetup


@pytest.mark.parametrize(
    ("num_bundles", "told"), [(None, "runs in no placement group"), (2, "of 2 bundles"), (4, "of 4 bundles")]
)
def test_a_group_of_the_wrong_size(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, num_bundles: int | None, told: str
) -> None:
    config = Settings.parse(model=str(tiny_model), tensor_parallel_size=2).engine_config()
    setups = [RankSetup(config=config, rank=rank, size=2, endpoint="", server_key=b"") for rank in range(2)]
    group = None if num_bundles is None else SimpleNamespace(bundle_count=num_bundles)
    monkeypatch.setattr(actor_launcher, "get_current_placement_group", lambda: group)
    launcher = RankActors()
    with pytest.raises(ConfigError, match=f"{told}; 2 ranks as Ray actors need 3 bundles"):
        launcher.launch(setups, lambda rank, how: None)
    launcher.kill()
    launcher.close()

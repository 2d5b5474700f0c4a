"""Each rank keeps to its share of a host's cores, where its worker is the only one there and computes on CPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from transom_core.config import CoreShare
from transom_core.settings.settings import Settings
from transom_worker.execution.ranks import rank_main
from transom_worker.execution.ranks.messages import Load

CONFIG = Settings.parse(model="m", device="cpu", tensor_parallel_size=2).engine_config()
LOAD = Load("", ranks_on_host=2, index_on_host=1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[CoreShare]:
    shares: list[CoreShare] = []

    def keep(share: CoreShare) -> frozenset[int]:
        shares.append(share)
        return frozenset({4, 5, 6})

    monkeypatch.setattr(rank_main, "keep_to_share", keep)
    return shares


def test_a_rank_on_its_own_cores_has_a_thread_for_each(asked: list[CoreShare]) -> None:
    assert rank_main._on_own_cores(CONFIG, LOAD).num_threads == 3
    assert asked == [CoreShare(index=1, count=2)]
    assert rank_main._on_own_cores(replace(CONFIG, num_threads=2), LOAD).num_threads == 2


def test_a_rank_beside_other_workers_goes_where_the_system_puts_it(asked: list[CoreShare]) -> None:
    config = replace(CONFIG, core_share=CoreShare(count=2))
    assert rank_main._on_own_cores(config, LOAD) is config
    assert not asked


def test_a_share_that_is_not_kept_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_main, "keep_to_share", lambda _: None)
    assert rank_main._on_own_cores(CONFIG, LOAD) is CONFIG

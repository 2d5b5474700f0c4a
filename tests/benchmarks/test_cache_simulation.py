"""The cache simulation's cases and the cells of its table."""

from __future__ import annotations

from benchmarks.cache.cases import CASES
from benchmarks.cache.simulation import shares


def test_every_case_has_a_name_of_its_own() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def test_a_cell_has_the_mean_of_the_seeds_and_their_range() -> None:
    reports = [{"hit_share": share, "repaired_share": 0.0} for share in (0.1, 0.2, 0.15)]
    assert shares(reports) == "15.0 (10.0 to 20.0)"
    assert shares([{"hit_share": 0.1, "repaired_share": 0.004}]) == "10.0 + 0.4"

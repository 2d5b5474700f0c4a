"""The daily combinations of a product cover what they should; the others are marked."""

from itertools import combinations, product

import pytest

from tests.matrices import covering, matrix

PARAMETERS = ([1, 2, 3], ["a", "b"], [None, 0.5], [True, False])


@pytest.mark.parametrize(("strength", "most"), [(1, 3), (2, 7), (3, 14), (4, 24)])
def test_every_choice_of_values_is_covered(strength: int, most: int) -> None:
    rows = covering(*PARAMETERS, strength=strength)
    for places in combinations(range(len(PARAMETERS)), strength):
        wanted = set(product(*(PARAMETERS[place] for place in places)))
        assert {tuple(row[place] for place in places) for row in rows} == wanted
    assert len(rows) <= most


def test_the_others_are_marked() -> None:
    found = matrix(*PARAMETERS)
    assert [each.values for each in found] == list(product(*PARAMETERS))
    assert [each.values for each in found if not each.marks] == covering(*PARAMETERS)
    assert {mark.name for each in found for mark in each.marks} == {"exhaustive"}
    assert found[0].id == "1-a-None-True"

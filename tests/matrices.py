"""Products of test parameters: a few combinations run every day, the others carry the marker `exhaustive`.

A *combination* has one value of each parameter. The daily ones are the fewest that a greedy search finds to cover every choice of
values of `strength` parameters: with strength 1 every value occurs once, with strength 2 every pair of values of two parameters.
The search has no randomness, so that the same combinations run every day.

Three parameters of 2, 2 and 3 values have 12 combinations; 6 of them cover every pair, 3 of them every value.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def covering(*parameters: Sequence[Any], strength: int = 2) -> list[tuple[Any, ...]]:
    """Return combinations that cover every choice of values of any `strength` parameters."""
    return [
        tuple(values[i] for values, i in zip(parameters, row, strict=True)) for row in _covering(parameters, strength)
    ]


def matrix(*parameters: Sequence[Any], strength: int = 2) -> list[ParameterSet]:
    """Return all combinations for `pytest.mark.parametrize`; those that `covering` leaves out are marked `exhaustive`."""
    daily = set(_covering(parameters, strength))
    return [
        _parameters(tuple(values[i] for values, i in zip(parameters, row, strict=True)), daily=row in daily)
        for row in product(*(range(len(values)) for values in parameters))
    ]


def some_daily(values: Iterable[Any], daily: Iterable[Any]) -> list[ParameterSet]:
    """Return all `values` for `pytest.mark.parametrize`; those outside `daily` are marked `exhaustive`.

    A value that is a tuple has one entry for each parameter.
    """
    values, daily = list(values), list(daily)
    assert all(value in values for value in daily), f"{daily} are not all among {values}"
    return [_parameters(value if isinstance(value, tuple) else (value,), daily=value in daily) for value in values]


def _covering(parameters: Sequence[Sequence[Any]], strength: int) -> list[tuple[int, ...]]:
    """Return rows of indices, one into each parameter's values."""
    places = list(combinations(range(len(parameters)), strength))
    bits: dict[Any, int] = {}  # a place and the values there -> a bit of its own

    def choices(row: tuple[int, ...]) -> int:
        return sum(bits.setdefault((place, tuple(row[i] for i in place)), 1 << len(bits)) for place in places)

    rows = {row: choices(row) for row in product(*(range(len(values)) for values in parameters))}
    missing, chosen = sum(bits.values()), []
    while missing:
        best = max(rows, key=lambda row: (rows[row] & missing).bit_count())  # the first of equals
        chosen.append(best)
        missing &= ~rows[best]
    return sorted(chosen)


def _parameters(row: tuple[Any, ...], *, daily: bool) -> ParameterSet:
    """Return one combination with a readable id."""
    names = [getattr(value, "__name__", None) or str(value) for value in row]
    return pytest.param(*row, id="-".join(names), marks=() if daily else pytest.mark.exhaustive)

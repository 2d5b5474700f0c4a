"""Shares of cores: equal, without overlap, with siblings together; which threads keep to them. The variables of waiting OpenMP
threads, and the thread on which a model is loaded.
"""

import os
import threading
from collections.abc import Mapping

import pytest
from hypothesis import given, strategies as st

from transom_core.config import CoreShare
from transom_core.machine import cores
from transom_core.machine.cores import cpus_of, keep_to_share, read_siblings
from transom_core.machine.openmp import SPIN_ROUNDS, call_on_thread, wait_variables


def shares(count: int, usable: set[int], siblings: Mapping[int, tuple[int, ...]]) -> list[frozenset[int]]:
    return [
        cpus_of(CoreShare(index=index, count=count), usable, lambda cpu: siblings.get(cpu, (cpu,)))
        for index in range(count)
    ]


PAIRS = {cpu: (cpu % 4, cpu % 4 + 4) for cpu in range(8)}


def test_the_example_of_the_docstring():
    assert shares(2, set(range(8)), PAIRS) == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    assert shares(4, set(range(8)), PAIRS) == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert shares(2, {3, 5, 6, 7}, {}) == [{3, 5}, {6, 7}]


@given(st.integers(1, 9), st.sets(st.integers(0, 63), min_size=1), st.booleans())
def test_shares_are_equal_and_do_not_overlap(count, usable, paired):
    siblings = {cpu: (cpu % 32, cpu % 32 + 32) for cpu in range(64)} if paired else {}
    found = shares(count, usable, siblings)
    assert {len(share) for share in found} == {len(usable) // count}
    assert sum(map(len, found)) == len(frozenset().union(*found))
    assert frozenset().union(*found) <= usable


def test_siblings_as_the_system_writes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "_SIBLINGS", f"{tmp_path}/{{}}")
    for number, text in enumerate(("0,4\n", "1-3\n", "2\n", "", "?")):
        (tmp_path / str(number)).write_text(text)
    assert [read_siblings(cpu) for cpu in range(6)] == [(0, 4), (1, 2, 3), (2,), (3,), (4,), (5,)]


@pytest.fixture
def machine(monkeypatch):
    """A machine with eight cpus, and what it was asked to keep to."""
    kept = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: kept.append(cpus), raising=False)
    monkeypatch.setattr(cores, "read_siblings", lambda cpu: (cpu,))
    return kept


def test_a_share_is_kept(machine):
    assert keep_to_share(CoreShare(index=1, count=2)) == frozenset({4, 5, 6, 7})
    assert machine == [{4, 5, 6, 7}]


@pytest.mark.parametrize(
    "share", [CoreShare(), CoreShare(index=2, count=2), CoreShare(index=0, count=8), CoreShare(index=3, count=5)]
)
def test_the_whole_machine_a_worker_too_many_and_single_cores_are_not_kept(machine, share):
    assert keep_to_share(share) is None
    assert machine == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": str(SPIN_ROUNDS)}),
        ({"PATH": "/bin"}, {"GOMP_SPINCOUNT": str(SPIN_ROUNDS)}),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ({"GOMP_SPINCOUNT": "7", "PATH": "/bin"}, {"GOMP_SPINCOUNT": "7"}),
    ],
)
def test_a_user_s_own_variables_are_kept(given, expected):
    assert wait_variables(given) == expected


def test_the_thread_has_ended_when_the_result_is_there():
    thread = call_on_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_an_error_is_raised_where_the_function_was_called():
    def fail() -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        call_on_thread(fail)

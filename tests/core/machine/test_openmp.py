"""The variables of waiting OpenMP threads, and the thread on which a model is loaded."""

import threading

import pytest

from transom_core.machine.openmp import SPIN_ROUNDS, call_on_thread, wait_variables


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

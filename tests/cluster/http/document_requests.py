"""Sends requests that an OpenAPI document allows, or forbids, while a test runs.

schemathesis' own `parametrize` makes the requests of every operation while pytest collects, in each of its processes, whether or
not the test is run there: seconds for each document.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.core.result import Ok
from schemathesis.pytest.lazy import get_all_tests
from schemathesis.schemas import BaseSchema


def check_all_operations(
    schema: BaseSchema, check: Callable[[Case], None], subtests: pytest.Subtests, *, max_examples: int
) -> None:
    """Calls `check` with requests of every operation of the document, `max_examples` of them drawn at random; each operation is a
    subtest."""
    examples = settings(
        max_examples=max_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    for made in get_all_tests(schema=schema, test_func=check, settings=examples, given_kwargs={}):
        assert isinstance(made, Ok), made
        operation, send_all = made.ok()
        with subtests.test(operation.label):
            send_all()

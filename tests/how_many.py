"""Says how many examples a random test tries: few every day, many in `make test-all`."""

import os

ALL_TESTS = os.environ.get("TRANSOM_TESTS") == "all"  # set by scripts/test_all


def num_examples(daily: int, exhaustive: int) -> int:
    """The number for `make test`, or the larger one for `make test-all`."""
    return exhaustive if ALL_TESTS else daily

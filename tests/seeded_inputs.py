"""A pytest plugin that seeds the random inputs of every test and says in a failure's report which seed it was.

Before each test the plugin seeds `random`, numpy and torch with a number made from the test's id. So a test draws the same
inputs in every run, alone or after others, in any process. A fixture that several tests share has a seed of its own, made from
its name, and leaves the random state as it found it. Hypothesis seeds torch anew for each of its examples, as it does `random`
and numpy.

`TRANSOM_TEST_SEED=7 pytest ...` draws other inputs throughout: the number is part of what seeds are made from. It is 0 by default.
"""

import os
import random
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import register_random


def chosen_seed() -> int:
    """The number that the environment gives."""
    return int(os.environ.get("TRANSOM_TEST_SEED", "0"))


def seed_of(name: str) -> int:
    """The seed of the test or shared fixture called `name`."""
    return zlib.crc32(f"{chosen_seed()} {name}".encode())


HAS_GPU = torch.cuda.is_available()


def seed_torch(seed: int) -> None:
    """Without a GPU the CPU's generator alone: `torch.manual_seed` also keeps a stack trace of every call, for a GPU that never
    comes, which takes a hundred times as long."""
    if HAS_GPU:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    seed_torch(seed)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restores the three random states at the end."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


class TorchForHypothesis:
    """torch's global generator with the methods of `random.Random` that hypothesis calls."""

    def seed(self, seed: int) -> None:
        seed_torch(seed + chosen_seed())

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


TORCH = TorchForHypothesis()  # hypothesis keeps a weak reference only
register_random(TORCH)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seed_all(seed_of(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    if fixturedef.scope == "function":
        return (yield)
    with random_state_kept():
        which = getattr(request, "param_index", 0)
        seed_all(seed_of(f"{request.node.nodeid} {fixturedef.argname} {which}"))
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        says = f"Seed {seed_of(item.nodeid)}, made from the test's id and TRANSOM_TEST_SEED={chosen_seed()}"
        report.sections.append(("Random inputs", says))
    return report

"""Fixtures that every test may use."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # two busy processes on two cores would spin each other to a halt
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if not Path("/dev/nvidiactl").exists():
    # read by triton when it is first imported, which torch may do for its own purposes; a caller that sets it knows better
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from hypothesis import settings

from tests.cpu_threads import NUM_THREADS
from tests.interpreter_speed import speed_up_interpreter
from transom_core.kv_cache import load_rates
from transom_kernels.cpu import threads
from transom_kernels.launch import prefer
from transom_worker.scheduling.rate_meter import RateMeter, ReadMeter

pytest_plugins = ["tests.seeded_inputs", "pytester"]

settings.register_profile("untimed", deadline=None)  # how fast an example runs is the machine's affair
settings.load_profile("untimed")

gc.disable()  # until all tests are collected: what is imported stays
torch.set_num_threads(NUM_THREADS)
threads.set_num_threads(NUM_THREADS)


def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: tests that wait for processes of their own leave a core to others."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_finish() -> None:
    """A full collection need not visit the millions of objects that imported modules and collected tests are made of."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # by default each 700 new objects start a collection: 8 % of the tests' time
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def quicker_interpreter() -> None:
    """For modules that have imported Triton."""
    speed_up_interpreter()


@pytest.fixture(scope="module", autouse=True)
def short_warm_up() -> Iterator[None]:
    """An engine that starts in this process decodes one made-up token, instead of running every kind of step, which takes longer
    than most tests. With `engine_driver.whole_warm_up`, and in processes of their own, it warms up as a user's engine does."""
    dummy_run = sys.modules.get("transom_worker.execution.setup.dummy_run")
    with pytest.MonkeyPatch.context() as patch:
        if dummy_run and not torch.cuda.is_available():
            patch.setattr(
                "transom_worker.execution.setup.model_setup.warm_up",
                lambda model, builder, **_: dummy_run.dummy_run(model, builder, [1]),
            )
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random llama checkpoint and a working tokenizer."""
    from tests.tiny_checkpoints import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="module")
def torch_operators() -> Iterator[None]:
    """Torch's operators compute, for tests of what moves around a model: compiling kernels for it would take most of their time."""
    with prefer("reference"):
        yield


@pytest.fixture
def fast_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading from the disk tier is fast by decree, so that every import is worth its time, also where it spares few tokens."""
    monkeypatch.setattr(load_rates, "UNMEASURED_READ_BYTES_PER_S", 1 << 62)
    monkeypatch.setattr(load_rates, "LEAST_READ_TOKENS", 8)
    monkeypatch.setattr(ReadMeter, "made", lambda *_: None)
    # a load from the host that was slow once would be computed next time
    monkeypatch.setattr(RateMeter, "loaded", lambda *_: None)

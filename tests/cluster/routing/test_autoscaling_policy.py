"""The number of workers on recorded signals: ramps, bursts, steady load, idleness, and zero."""

from dataclasses import replace

import pytest

from transom_cluster.routing.autoscaling import wanted_replicas
from transom_core.config import AutoscalingConfig
from transom_core.contract import WorkerLoad

CONFIG = AutoscalingConfig(
    min_replicas=1, max_replicas=4, first_token_objective_s=2.0, upscale_delay_s=10, downscale_delay_s=300
)
FROM_ZERO = replace(CONFIG, min_replicas=0)
IDLE = WorkerLoad(max_num_seqs=16, prefill_tokens_per_s=1000.0, decode_step_s=0.02, first_token_s=5.0)


def load(
    running: int, waiting: int = 0, tokens: int = 0, used: float = 0.1, first_s: float = 0.3, rate: float = 1000.0
) -> WorkerLoad:
    return WorkerLoad(
        num_running=running,
        num_waiting=waiting,
        max_num_seqs=16,
        waiting_tokens=tokens,
        used_share=used,
        prefill_tokens_per_s=rate,
        decode_step_s=0.02,
        first_token_s=first_s,
    )


def wanted(*loads: WorkerLoad, target: int = 0, unplaced: int = 0, config: AutoscalingConfig = CONFIG) -> int:
    return wanted_replicas(loads, num_unplaced=unplaced, num_target=target or len(loads), config=config)


def test_a_ramp_adds_workers_as_it_rises_and_takes_them_away_as_it_falls():
    recorded = [
        [load(2)],
        [load(8, tokens=400)],
        [load(14, tokens=1500, used=0.6)],
        [load(16, 5, tokens=3000, used=0.8, first_s=1.8)],  # more than one can compute within two seconds
        [load(13, 1, tokens=1400, used=0.6), load(9, tokens=700, used=0.3)],
        [load(16, 4, tokens=2600, used=0.8, first_s=1.5), load(16, 3, tokens=2400, used=0.8, first_s=1.4)],
        [load(14, used=0.6), load(12, used=0.5), load(10, used=0.5)],
        [load(8, used=0.3), load(7, used=0.3), load(7, used=0.3)],
        [load(4, used=0.2), load(3, used=0.1)],
        [load(1), IDLE],
        [IDLE],
    ]
    counts = [1]  # each answer is followed at once
    for loads in recorded:
        counts.append(wanted(*loads, target=counts[-1]))
    assert counts[1:] == [1, 1, 1, 2, 2, 3, 3, 3, 1, 1, 1]


def test_steady_load_moves_nothing():
    """One request more or less, around any number of workers."""
    for workers in (1, 2, 3):
        for wobble in (-1, 0, 1):
            assert wanted(*[load(12 + wobble, used=0.6 + 0.05 * wobble, tokens=500)] * workers) == workers


def test_slow_first_tokens_add_one_at_a_time():
    late = load(10, 1, tokens=100, first_s=2.5)
    assert wanted(late) == 2
    assert wanted(late, target=2) == 2  # it is starting
    assert wanted(late, load(10)) == 3
    assert wanted(load(10, 0, first_s=60.0)) == 1  # of the past: no request waits
    assert wanted(load(3, 1, tokens=100, first_s=1.6), load(3)) == 2  # one less would be late


@pytest.mark.parametrize(("used", "workers"), [(0.5, 1), (0.84, 1), (0.9, 2)])
def test_full_pools_add_workers(used: float, workers: int):
    assert wanted(load(5, used=used)) == workers


def test_without_a_known_rate_sequences_decide():
    assert wanted(load(0, 3, tokens=100_000, rate=0.0)) == 1
    assert wanted(load(16, 20, tokens=100_000, rate=0.0)) == 3


def test_zero_stays_until_a_request_waits():
    assert wanted(target=0, config=FROM_ZERO) == 0
    assert wanted(target=0, unplaced=1, config=FROM_ZERO) == 1
    assert wanted(target=0, unplaced=50, config=FROM_ZERO) == 1  # how much they need is known once one runs
    assert wanted(target=0) == 1


def test_workers_that_start_are_not_taken_away_before_they_help():
    assert wanted(load(16, 20, tokens=5000, first_s=4.0), target=3) == 3

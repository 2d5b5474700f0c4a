"""The policy as Ray Serve runs it: from reports of replicas, through Serve's own delays."""

import inspect
import pickle
import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, of pydantic
    from ray.serve._private.autoscaling_state import _resolve_policy_callable
    from ray.serve.autoscaling_policy import _apply_autoscaling_config
    from ray.serve.config import AutoscalingContext

    from transom_cluster.serve.replica_autoscaling import serve_autoscaling, worker_loads

from dataclasses import asdict

from transom_core.contract import WorkerLoad
from transom_core.settings.settings import Settings

BUSY = WorkerLoad(num_running=60, num_waiting=40, max_num_seqs=64, waiting_tokens=9000, prefill_tokens_per_s=1000.0)
IDLE = WorkerLoad(max_num_seqs=64)


def decide(*loads: WorkerLoad, target: int, queued: float = 0.0, **settings: Any) -> int:
    """What Serve's controller would decide now, with the policy as it got it over the wire."""
    config = Settings.parse(model="m", max_replicas=4, **{"upscale_delay_s": 0, "downscale_delay_s": 0, **settings})
    autoscaling = config.autoscaling_config()
    assert autoscaling is not None
    serve_config = pickle.loads(pickle.dumps(serve_autoscaling(autoscaling, initial_replicas=1)))
    reports = {name: {f"r{i}": asdict(load)[name] for i, load in enumerate(loads)} for name in asdict(IDLE)}
    # Ray before 2.60 also asks for the calls of its task consumers, of which there are none.
    asks_for_async = "total_pending_async_requests" in inspect.signature(AutoscalingContext).parameters
    context = AutoscalingContext(
        **({"total_pending_async_requests": None} if asks_for_async else {}),
        deployment_id=None,
        deployment_name="Worker",
        app_name="transom",
        current_num_replicas=len(loads),
        target_num_replicas=target,
        running_replicas=list(reports["num_running"]),
        total_num_requests=len(loads) + queued,  # routers' streams are calls that never end
        total_queued_requests=queued,
        aggregated_metrics=reports,
        raw_metrics={},
        capacity_adjusted_min_replicas=serve_config.min_replicas,
        capacity_adjusted_max_replicas=serve_config.max_replicas,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=serve_config,
    )
    wanted, _ = _apply_autoscaling_config(_resolve_policy_callable(serve_config.policy))(context)
    return wanted


def test_serve_follows_the_policy():
    assert decide(BUSY, target=1) == 4
    assert decide(IDLE, IDLE, target=2) == 1
    assert decide(IDLE, target=1, min_replicas=0) == 0


def test_delays_hold_a_change_back():
    assert decide(BUSY, target=1, upscale_delay_s=10) == 1
    assert decide(IDLE, IDLE, target=2, downscale_delay_s=10) == 2


def test_a_waiting_request_starts_the_first_worker_without_delay():
    assert decide(target=0, min_replicas=0) == 0
    assert decide(target=0, queued=1.0, min_replicas=0, upscale_delay_s=100) == 1


def test_reports_become_loads():
    metrics: dict[str, dict[Any, float]] = {
        "num_running": {"a": 1.2, "b": 0.0},
        "used_share": {"a": 0.25, "b": 0.5},
        "max_num_seqs": {"a": 8},
    }
    one, two = worker_loads(metrics)
    assert (one.num_running, one.used_share, one.max_num_seqs) == (2, 0.25, 8)
    assert (two.num_running, two.used_share, two.max_num_seqs) == (0, 0.5, 1)
    assert worker_loads({}) == []

"""The adapter between Transom's autoscaling policy (`routing.autoscaling`) and Ray Serve's autoscaler.

Serve's controller collects the workers' load reports, calls `ServeAutoscalingPolicy` several times a second, applies the delays,
and starts and drains workers. Workers report their load through `WorkerReplica.record_autoscaling_stats`.
"""

import math
import warnings
from dataclasses import asdict
from typing import Any

from ray.serve import config as serve_config

from transom_cluster.routing.autoscaling import wanted_replicas
from transom_core.config import AutoscalingConfig
from transom_core.contract import WorkerLoad

REPORT_PERIOD_S = 1.0  # Serve's default is 10
AVERAGED_OVER_S = 3.0  # Serve passes the mean load of this time to the policy
_COUNTS = ("num_running", "num_waiting", "max_num_seqs", "waiting_tokens")


class ServeAutoscalingPolicy:
    """Calls `wanted_replicas` with the loads that Serve has collected. Serve passes the fields of AutoscalingConfig as keywords."""

    def __init__(self, **config: Any) -> None:
        self._config = AutoscalingConfig(**config)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas for Serve's AutoscalingContext, and no state for Serve to keep."""
        wanted = wanted_replicas(
            worker_loads(context.aggregated_metrics or {}),
            num_unplaced=math.ceil(context.total_queued_requests or 0),
            num_target=context.target_num_replicas,
            config=self._config,
        )
        return wanted, {}


def worker_loads(metrics: dict[str, dict[Any, float]]) -> list[WorkerLoad]:
    """Turn Serve's means (metric -> replica -> mean) into one `WorkerLoad` per replica. Counts are rounded up."""
    by_replica: dict[Any, dict[str, Any]] = {}
    for name in WorkerLoad.__dataclass_fields__:
        for replica, value in metrics.get(name, {}).items():
            by_replica.setdefault(replica, {})[name] = math.ceil(value) if name in _COUNTS else value
    return [WorkerLoad(**values) for values in by_replica.values()]


def serve_autoscaling(config: AutoscalingConfig, *, initial_replicas: int) -> serve_config.AutoscalingConfig:
    """Build Serve's deployment option `autoscaling_config`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray wants an environment variable of Ray itself instead
        return serve_config.AutoscalingConfig(
            min_replicas=config.min_replicas,
            max_replicas=config.max_replicas,
            initial_replicas=max(initial_replicas, config.min_replicas),
            metrics_interval_s=REPORT_PERIOD_S,
            look_back_period_s=AVERAGED_OVER_S,
            upscale_delay_s=config.upscale_delay_s,
            downscale_delay_s=config.downscale_delay_s,
            policy=serve_config.AutoscalingPolicy(
                policy_function=f"{__name__}:{ServeAutoscalingPolicy.__name__}", policy_kwargs=asdict(config)
            ),
        )

"""The policy inside Ray Serve's autoscaler: Serve collects the signals, applies the delays, starts and drains workers.

Serve runs `ServePolicy` in its controller, several times a second. Workers report by `WorkerReplica.record_autoscaling_stats`.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict
from typing import Any

from ray.serve import config as serve_config

from transom_cluster.routing.autoscaling import wanted_replicas
from transom_worker.config import AutoscalingConfig
from transom_worker.contract import WorkerLoad

REPORT_PERIOD_S = 1.0  # Serve's default is 10
AVERAGED_OVER_S = 3.0
_COUNTS = ("num_running", "num_waiting", "max_num_seqs", "waiting_tokens")


class ServePolicy:
    """Serve's interface to `wanted_replicas`; made from `asdict(AutoscalingConfig)`."""

    def __init__(self, **config: Any) -> None:
        self._config = AutoscalingConfig(**config)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas wanted for Serve's AutoscalingContext, and no state to keep."""
        wanted = wanted_replicas(
            loads_of(context.aggregated_metrics or {}),
            num_unplaced=math.ceil(context.total_queued_requests or 0),
            num_target=context.target_num_replicas,
            config=self._config,
        )
        return wanted, {}


def loads_of(metrics: dict[str, dict[Any, float]]) -> list[WorkerLoad]:
    """What every replica reported: from metric -> replica -> mean to one load a replica. Counts are rounded up."""
    by_replica: dict[Any, dict[str, Any]] = {}
    for name in WorkerLoad.__dataclass_fields__:
        for replica, value in metrics.get(name, {}).items():
            by_replica.setdefault(replica, {})[name] = math.ceil(value) if name in _COUNTS else value
    return [WorkerLoad(**values) for values in by_replica.values()]


def serve_autoscaling(config: AutoscalingConfig, *, initial_replicas: int) -> serve_config.AutoscalingConfig:
    """The deployment option `autoscaling_config` for Serve."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its substitute is in the environment of Ray itself
        return serve_config.AutoscalingConfig(
            min_replicas=config.min_replicas,
            max_replicas=config.max_replicas,
            initial_replicas=max(initial_replicas, config.min_replicas),
            metrics_interval_s=REPORT_PERIOD_S,
            look_back_period_s=AVERAGED_OVER_S,
            upscale_delay_s=config.upscale_delay_s,
            downscale_delay_s=config.downscale_delay_s,
            policy=serve_config.AutoscalingPolicy(
                policy_function=f"{__name__}:{ServePolicy.__name__}", policy_kwargs=asdict(config)
            ),
        )

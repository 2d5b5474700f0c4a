"""`Simulation`: replays a workload through scheduler and KV cache without a model. `transom bench simulate` prints its report.

A workload is a recorded trace or synthetic conversations. The report says how many prompt tokens hit the prefix cache.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from transom_core.config import SchedulerConfig
from transom_core.errors import ConfigError
from transom_core.kv_cache.layout import ArenaLayout
from transom_core.model_config.architecture import read_architecture
from transom_core.model_files.text_files import read_json
from transom_core.settings.byte_sizes import parse_bytes
from transom_worker.kvcache.eviction.eviction_policy import EvictionPolicy
from transom_worker.kvcache.manager import KvCache
from transom_worker.planner.blocks import cache_groups
from transom_worker.planner.pages import make_host_layout
from transom_worker.planner.plan import CachePlan, plan_from_config
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.simulate.conversations import WORKING_SET_TOKENS, build_workload
from transom_worker.simulate.outcome import Report
from transom_worker.simulate.replay import OnProgress, Replay, StepCost, VirtualClock
from transom_worker.simulate.trace import read_trace
from transom_worker.simulate.workload import Workload

ARRIVALS = ("sequential", "recorded")
TRACE_BATCHED_TOKENS = 8_192
SYNTHETIC_BATCHED_TOKENS = 2_048  # the setting with which other engines' figures were published


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """What is replayed (`trace` or `workload`), for which model, in how much memory, and how requests arrive.

    `host_memory` is the size of the host tier. `limit` requests are replayed after the first `skip`. `seed` sets the order of
    workloads with a random order, and salts the digests (0: no salt); several seeds show how much chance changes a figure.
    `cost` is the time that a step takes on the virtual clock.
    """

    model: Path
    memory: str
    trace: Path | None = None
    workload: str | None = None
    arrivals: str = "sequential"
    host_memory: str = "0"
    skip: int = 0
    limit: int | None = None
    block_size: int = 16
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 256
    seed: int = 0
    window_repair: bool = True
    cost: StepCost = field(default_factory=StepCost)

    @property
    def batched_tokens(self) -> int:
        """Return the most tokens computed in one step."""
        default = SYNTHETIC_BATCHED_TOKENS if self.trace is None else TRACE_BATCHED_TOKENS
        return self.max_num_batched_tokens or default


class Simulation:
    """Reads the workload and builds the scheduler; `run` replays the workload once.

    `policy` decides what is evicted; None means the cache's own policy.

    Raises:
        ConfigError: settings contradict each other, or the trace cannot be read.
        ModelError: the model cannot be planned.
    """

    def __init__(self, config: SimulationConfig, *, policy: EvictionPolicy | None = None) -> None:
        _check(config)
        self._config = config
        self.workload = _workload(config)
        self._plan: CachePlan = read_plan(
            config.model,
            memory=config.memory,
            block_size=config.block_size,
            max_num_batched_tokens=config.batched_tokens,
        )
        self._clock = VirtualClock()
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.batched_tokens,
                max_waiting=len(self.workload.requests),
            ),
            KvCache(
                self._plan.layout,
                _host_layout(config.host_memory, self._plan.layout),
                block_size=config.block_size,
                window_repair=config.window_repair,
                policy=policy,
                clock=self._clock,
            ),
            max_model_len=self._plan.max_model_len,
        )

    def run(self, on_progress: OnProgress = lambda num_ended: None) -> Report:
        """Replay the workload."""
        config = self._config
        replay = Replay(
            self.scheduler,
            self.workload,
            cost=config.cost,
            clock=self._clock,
            cache_salt=str(config.seed) if config.seed else None,
        )
        return replace(replay.run(on_progress), setup=self._setup(), memory_bytes=self._plan.layout.pool_bytes)

    def _setup(self) -> dict[str, object]:
        config = self._config
        return {
            "workload": self.workload.name,
            "model": _config_file(config.model).parent.name,
            "memory": config.memory,
            "host_memory": config.host_memory,
            "arrivals": config.arrivals,
            "max_model_len": self._plan.max_model_len,
            "block_size": config.block_size,
            "max_num_batched_tokens": config.batched_tokens,
            "max_num_seqs": config.max_num_seqs,
            "window_repair": config.window_repair,
            "seed": config.seed,
            "step_cost": asdict(config.cost),
        }


def _check(config: SimulationConfig) -> None:
    if (config.trace is None) == (config.workload is None):
        raise ConfigError("Give either --trace FILE or --workload NAME.")
    if config.arrivals not in ARRIVALS:
        raise ConfigError(f"--arrivals is {config.arrivals!r}; take one of {', '.join(ARRIVALS)}.")
    if config.trace is not None and config.memory.endswith("x"):
        raise ConfigError(
            f"--memory {config.memory} is a multiple of the sessions' working set; for a trace give bytes."
        )


def _host_layout(host_memory: str, layout: ArenaLayout) -> ArenaLayout | None:
    """Return the arena of the host tier; None if it has no memory."""
    num_bytes = parse_bytes(host_memory, name="--host-memory")
    return make_host_layout(layout, num_bytes) if num_bytes else None


def _workload(config: SimulationConfig) -> Workload:
    if config.trace is not None:
        workload = read_trace(config.trace, limit=None if config.limit is None else config.skip + config.limit)
    else:
        assert config.workload is not None
        workload = build_workload(config.workload, seed=config.seed)
    part = workload.part(config.skip, config.limit)
    return part.one_by_one() if config.arrivals == "sequential" else part


def read_plan(path: Path, *, memory: str, block_size: int = 16, max_num_batched_tokens: int = 8192) -> CachePlan:
    """Return the plan of the KV cache for a `config.json`; `path` is the file or its folder.

    `memory` is a size such as 40GiB, or a multiple such as 2x of the *working set*: the KV memory that full-attention layers need
    for all synthetic sessions (`conversations`) at their end.

    Raises:
        ModelError: there is no such file, or the model cannot be planned.
        ConfigError: the size cannot be read, or memory is too small.
    """
    config = read_json(_config_file(path))
    return plan_from_config(
        config,
        memory_bytes=_memory_bytes(memory, config, block_size),
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def _config_file(path: Path) -> Path:
    return (path if path.is_file() else path / "config.json").resolve()


def _memory_bytes(text: str, config: Mapping[str, Any], block_size: int) -> int:
    if not text.endswith("x"):
        return parse_bytes(text, name="--memory")
    multiple = re.fullmatch(r"(\d+(?:\.\d+)?)x", text)
    if multiple is None:
        raise ConfigError(f"--memory is {text!r}; give a size such as 40GiB, or a multiple such as 2x.")
    return int(Fraction(multiple[1]) * _working_set_bytes(config, block_size))


def _working_set_bytes(config: Mapping[str, Any], block_size: int) -> int:
    """Return the bytes of `1x`: the blocks of full-attention layers for all synthetic sessions at their end."""
    architecture = read_architecture(config)
    groups = cache_groups(architecture, block_size=block_size, dtype=architecture.served_dtype)
    full = [group for group in groups if group.spec.keeps_everything]
    if not full:
        raise ConfigError(
            "--memory is a multiple of full-length blocks, and every layer of this model slides; give bytes."
        )
    return sum(WORKING_SET_TOKENS // group.spec.block_size * group.block_bytes for group in full)

"""`Settings`: every setting that a user can give, in one flat namespace.

Three sources use the same names: the flags of `transom serve`, the arguments in a Ray Serve YAML file, and the keywords of
`LLM(...)`. A setting that `vllm serve` also has is called as it is there. `Settings.parse` checks them once; `engine_config`,
`server_config` and `autoscaling_config` resolve them into the frozen configs that the parts of the system receive.

A setting is declared once, in the class of its section. It is copied into every config that has a field of its name (`_config`);
the three methods set only the fields whose name or value differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import ConfigDict, ValidationError

from transom_core.config import (
    AutoscalingConfig,
    CacheConfig,
    EngineConfig,
    FailoverConfig,
    LimitsConfig,
    LoraConfig,
    ModelConfig,
    PriorityConfig,
    RanksConfig,
    SchedulerConfig,
    ServerConfig,
    TracingConfig,
    TransferConfig,
)
from transom_core.contract.kv_policy import kv_policy_from_json
from transom_core.errors import ConfigError
from transom_core.settings.byte_sizes import parse_bytes
from transom_core.settings.engine_settings import (
    BatchingSettings,
    CacheSettings,
    HybridSettings,
    ModelSettings,
    RanksSettings,
)
from transom_core.settings.http_settings import AnswerSettings, ClientSettings, HttpSettings, LogSettings, read_origins
from transom_core.settings.kv_dtypes import KvDtypes, as_text
from transom_core.settings.lora_settings import LoraSettings, read_lora_modules
from transom_core.settings.worker_settings import WorkerGroup, WorkersSettings

DISK_HOST_BYTES = 1 << 30  # size of the host tier if the user gives none, but a disk tier or a role needs one

Config = TypeVar("Config")


class Settings(
    LogSettings,
    ClientSettings,
    HttpSettings,
    AnswerSettings,
    WorkersSettings,
    RanksSettings,
    BatchingSettings,
    LoraSettings,
    HybridSettings,
    CacheSettings,
    ModelSettings,
):
    """Every setting of Transom, with its default, its limits and its description.

    Pydantic takes the fields of the last base class first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @classmethod
    def parse(cls, **values: Any) -> Settings:
        """Check settings given by name.

        Raises:
            ConfigError: an unknown name, a wrong value, or one that is not supported yet; the message names it.
        """
        for name in ("kv_cache_memory_bytes", "disk_space"):
            if isinstance(values.get(name), str):
                values[name] = parse_bytes(values[name], name=name)
        if isinstance(values.get("swap_space"), str):
            values["swap_space"] = gibibytes(values["swap_space"], name="swap_space")
        if isinstance(values.get("kv_cache_dtype"), Mapping):
            values["kv_cache_dtype"] = as_text(values["kv_cache_dtype"])
        if values.get("worker_group"):
            values["worker_group"] = tuple(map(WorkerGroup.read, values["worker_group"]))
        for name in ("api_key", "served_model_name"):
            if isinstance(values.get(name), str):
                values[name] = (values[name],)
        if values.get("lora_modules"):
            values["lora_modules"] = read_lora_modules(values["lora_modules"])
        if values.get("allowed_origins"):
            values["allowed_origins"] = read_origins(values["allowed_origins"])
        try:
            settings = cls(**values)
        except ValidationError as error:
            problems = "; ".join(_describe(problem) for problem in error.errors())
            raise ConfigError(f"Wrong settings: {problems}.") from None
        settings._check_together()
        return settings

    def _check_together(self) -> None:
        KvDtypes.parse(self.kv_cache_dtype)
        self.check_pattern()
        self.check_replicas()
        self.check_ports()
        self.groups()
        self.check_disk()
        if self.preemption_mode == "swap" and not self._swap_space_bytes():
            raise ConfigError(
                "--preemption-mode swap moves requests to the host tier, and there is none; give --swap-space, or leave it out."
            )
        if self.kv_policy is not None:
            kv_policy_from_json(self.kv_policy)
        self.check_lora(self.served_model_name or (self.model,))
        self.check_parsers()
        self.check_endpoint()

    def groups(self) -> list[Settings]:
        """Return the settings of the further groups of workers, each as if it were the only group.

        Raises:
            ConfigError: a group's values do not fit.
        """
        own = {name: getattr(self, name) for name in self.model_fields_set} | {"worker_group": ()}
        own |= {"min_replicas": None, "max_replicas": None}
        given = [{name: getattr(group, name) for name in group.model_fields_set} for group in self.worker_group]
        return [
            Settings.parse(**{**own, "tensor_parallel_size": 1, "role": "both", "replicas": 1, **one}) for one in given
        ]

    def engine_config(self) -> EngineConfig:
        """Return the settings of one worker."""
        return self._config(
            EngineConfig,
            model=self._config(ModelConfig),
            cache=self._config(
                CacheConfig, swap_space_bytes=self._swap_space_bytes(), disk_space_bytes=self.disk_space
            ),
            scheduler=self._config(
                SchedulerConfig,
                policy=self.scheduling_policy,
                target_step_s=self.target_step_s or None,
                by_device=BY_DEVICE - self.model_fields_set,
            ),
            ranks=self._config(RanksConfig, size=self.tensor_parallel_size),
            transfer=TransferConfig(
                is_on=self.kv_transfer,
                timeout_s=self.kv_transfer_timeout_s,
                wire=self.kv_transfer_wire,
                verify=self.kv_transfer_verify,
                ucx=tuple(
                    (name, value)
                    for name, value in (
                        ("UCX_NET_DEVICES", self.kv_transfer_devices),
                        ("UCX_TLS", self.kv_transfer_transports),
                        ("UCX_TCP_PORT_RANGE", self.kv_transfer_ports),
                    )
                    if value
                ),
            ),
            lora=self._config(LoraConfig) if self.enable_lora else None,
            tracing=self._tracing_config(),
        )

    def autoscaling_config(self) -> AutoscalingConfig | None:
        """Return the settings of the autoscaler; None if the number of workers is fixed."""
        if self.max_replicas is None:
            return None
        return self._config(AutoscalingConfig, min_replicas=1 if self.min_replicas is None else self.min_replicas)

    def server_config(self) -> ServerConfig:
        """Return the settings of a router."""
        first_name, *aliases = self.served_model_name or (self.model,)
        return self._config(
            ServerConfig,
            served_model_name=first_name,
            model_aliases=tuple(aliases),
            api_keys=self.api_key,
            limits=self._config(LimitsConfig),
            priorities=self._config(PriorityConfig, policy=self.scheduling_policy),
            failover=self._config(FailoverConfig, wait_s=self.worker_wait_s),
            tracing=self._tracing_config(),
        )

    def _config(self, kind: type[Config], **resolved: object) -> Config:
        """Make one config. A field's value is that in `resolved`, else that of the setting with its name, else its default."""
        names = {one.name for one in fields(kind)}  # type: ignore[arg-type]  # a dataclass
        named = {name: getattr(self, name) for name in names & SETTING_NAMES}
        return kind(**(named | resolved))

    def _swap_space_bytes(self) -> int:
        """Return the size of the host tier in bytes. Blocks from the disk or from other workers pass through it."""
        needs_one = self.disk_cache or (self.role != "both" and self.kv_transfer)
        return int(self.swap_space * 2**30) or (DISK_HOST_BYTES if needs_one else 0)

    def _tracing_config(self) -> TracingConfig | None:
        if self.otlp_traces_endpoint is None:
            return None
        return TracingConfig(endpoint=self.otlp_traces_endpoint, sample_ratio=self.trace_sample_ratio)


SETTING_NAMES = frozenset(Settings.model_fields)
BY_DEVICE = frozenset(("max_num_seqs", "max_num_batched_tokens"))  # settings whose default the worker's device decides


def gibibytes(text: str, *, name: str) -> float:
    """Return a size in GiB: a number without a unit counts GiB, as in vLLM."""
    try:
        return float(text)
    except ValueError:
        return parse_bytes(text, name=name) / 2**30


def _describe(problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{name} is not a setting of Transom"
    return f"{name} is {problem['input']!r}: {problem['msg']}"

"""Settings of a cluster: how many workers and routers there are, what the workers are for, and how requests reach them."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from transom_core.config import RoutingPolicy, TransferWire, WorkerRole
from transom_core.errors import ConfigError


class WorkerGroup(BaseModel):
    """A further group of workers of the same model: the settings in which it differs from the other workers. Its number of workers
    is fixed."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    role: WorkerRole = "both"
    replicas: int = Field(1, ge=1)
    tensor_parallel_size: int = Field(1, ge=1)
    kv_cache_memory_bytes: int | str | None = None
    swap_space: float | str | None = None
    max_num_seqs: int | None = Field(None, ge=1)
    max_num_batched_tokens: int | None = Field(None, ge=1)
    num_threads: int | None = Field(None, ge=1)

    @classmethod
    def read(cls, given: object) -> object:
        """Return a text from the command line, such as `role=prefill,replicas=2`, as a dict; return anything else unchanged."""
        if not isinstance(given, str):
            return given
        pairs = [part.partition("=") for part in given.split(",")]
        if unclear := [name for name, equals, _ in pairs if not equals]:
            raise ConfigError(
                f"--worker-group is {given!r}, and {unclear[0]!r} has no value; give names and values, such as "
                "role=prefill,replicas=2."
            )
        return {name.strip(): value.strip() for name, _, value in pairs}


class WorkersSettings(BaseModel):
    """Workers and routers, the autoscaler, failover and KV transfer."""

    replicas: int = Field(1, ge=1, description="Number of workers; with --max-replicas the number at start.")
    min_replicas: int | None = Field(
        None, ge=0, description="Least number of workers while the cluster is idle, with --max-replicas; 1 if unset."
    )
    max_replicas: int | None = Field(
        None, ge=1, description="Most workers: the autoscaler changes their number with the load."
    )
    first_token_objective_s: float = Field(
        2.0, gt=0, description="The autoscaler adds workers while requests would wait longer for their first token."
    )
    upscale_delay_s: float = Field(
        10.0, ge=0, description="How long the autoscaler must want more workers before it adds them."
    )
    downscale_delay_s: float = Field(
        300.0, ge=0, description="How long the autoscaler must want fewer workers before it removes any."
    )
    router_replicas: int = Field(1, ge=1, description="Number of routers; each one knows all workers.")
    routing_policy: RoutingPolicy = Field(
        "kv", description="How a router chooses a worker; kv: the least expected cost, cached prefixes counted."
    )
    max_resumes: int = Field(
        4, ge=0, description="How often a request may migrate to another worker when its worker is lost."
    )
    max_lost_workers: int = Field(
        3, ge=1, description="How many workers may be lost to one request before it is stopped (docs/failover.md)."
    )
    worker_wait_s: float = Field(
        60.0, gt=0, description="How long a request waits, connection open, while no worker can take it."
    )
    role: WorkerRole = Field(
        "both",
        description="prefill: the workers compute prompts and first tokens; decode: they fetch the KV and continue, "
        "and compute short prompts. Without workers of the other role, every worker does both.",
    )
    worker_group: tuple[WorkerGroup, ...] = Field(
        (),
        description="A further group of workers, such as role=prefill,replicas=2,tensor_parallel_size=4. Besides these "
        "names: kv_cache_memory_bytes, swap_space, max_num_seqs, max_num_batched_tokens, num_threads.",
    )
    kv_transfer: bool = Field(
        True,
        description="Workers with a host tier (--swap-space) fetch cached prefixes from each other where that is cheaper than "
        "computing them.",
    )
    kv_transfer_timeout_s: float = Field(
        10.0,
        gt=0,
        description="How long a request waits for a prefix from another worker before its prompt is computed.",
    )
    kv_transfer_wire: TransferWire = Field(
        "auto",
        description="How workers fetch KV blocks from each other. nixl: ranks read the other worker's memory by "
        "NIXL, which `transom[transfer]` installs; ray: by calls through Ray; auto: nixl where it is installed.",
    )
    kv_transfer_verify: Literal["sample", "all"] = Field(
        "sample",
        description="Which blocks that NIXL has read are compared with the other worker's digests: two of each group, "
        "or all, for which the other worker's steps wait.",
    )
    kv_transfer_devices: str = Field(
        "",
        description="The network devices over which NIXL moves KV blocks between hosts, such as eth0 or "
        "mlx5_0:1,mlx5_1:1 (UCX_NET_DEVICES); all if unset.",
    )
    kv_transfer_transports: str = Field(
        "",
        description="The transports that NIXL may use, such as tcp or rc,cuda,sm (UCX_TLS); what UCX finds if unset.",
    )
    kv_transfer_ports: str = Field(
        "",
        pattern=r"^(\d{1,5}-\d{1,5})?$",
        description="The TCP ports at which ranks listen for NIXL, one or more each, such as 30000-30999 "
        "(UCX_TCP_PORT_RANGE); any free ones if unset.",
    )

    def check_ports(self) -> None:
        """Raise ConfigError if the TCP ports of KV transfers are no range."""
        if self.kv_transfer_ports:
            first, last = map(int, self.kv_transfer_ports.split("-"))
            if not 0 < first <= last <= 65535:
                raise ConfigError(
                    f"--kv-transfer-ports is {self.kv_transfer_ports}; it must be a range from 1 to 65535, such as 30000-30999."
                )

    def check_replicas(self) -> None:
        """Raise ConfigError if the numbers of workers contradict each other."""
        least, most = self.min_replicas, self.max_replicas
        if most is None:
            if least is not None:
                raise ConfigError(
                    f"--min-replicas is {least}; it needs --max-replicas, without which --replicas is fixed."
                )
        elif (1 if least is None else least) > most or self.replicas > most:
            raise ConfigError(
                f"--max-replicas is {most}, --min-replicas {1 if least is None else least} and --replicas {self.replicas}; "
                "the largest must be --max-replicas."
            )

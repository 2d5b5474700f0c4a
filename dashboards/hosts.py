"""The Workers dashboard's section about hosts, from Ray's agents: empty where Prometheus has no job for them (`make monitor`)."""

from __future__ import annotations

from dashboards.board import Section
from dashboards.panels import NO_LIMITS, About, Limits, Panel, high_is_bad, lines
from dashboards.queries import Query

UNSEEN, NO_GPU = "no job `ray`", "no GPU seen"
GPU = "instance, GpuIndex"
USED = f"sum by ({GPU}) (ray_node_gram_used)"
MEMORY_SHARE = "max by (instance) (ray_node_mem_used / ray_node_mem_total)"
GPU_SHARE = f"{USED} / ({USED} + sum by ({GPU}) (ray_node_gram_available))"
NEARLY_FULL = high_is_bad(0.85, 0.95)


def _shares(about: About, expr: str, legend: str, limits: Limits = NO_LIMITS, *, unseen: str = UNSEEN) -> Panel:
    panel = lines(about, [Query(expr=expr, legend=legend)], "percentunit", maximum=1, limits=limits, width=6)
    return panel.no_value(unseen)


HOSTS = Section(
    title="Hosts",
    panels=[
        _shares(
            About(
                title="CPU of hosts",
                shows="Share of all cores that are busy. All hosts of the Ray cluster, whatever the variables.",
                act="Near 100 % with slow steps: something else runs there, or more ranks than cores.",
            ),
            "max by (instance) (ray_node_cpu_utilization) / 100",
            "{{instance}}",
        ),
        _shares(
            About(
                title="Memory of hosts",
                shows="Share of each host's memory (of its pod's, on Kubernetes) that is taken. Dashed: 85 % and 95 %.",
                act="Near 100 %: processes are killed, see TransomRanksRestart. Fewer workers a host, or more memory.",
            ),
            MEMORY_SHARE,
            "{{instance}}",
            NEARLY_FULL,
        ),
        _shares(
            About(
                title="Busy GPUs",
                shows="Share of time in which a kernel ran on each GPU.",
                act="Low while requests wait: see *Step time by part*. One low among its worker's: compare hosts.",
            ),
            f"max by ({GPU}) (ray_node_gpus_utilization) / 100",
            "{{instance}} GPU {{GpuIndex}}",
            unseen=NO_GPU,
        ),
        _shares(
            About(
                title="Memory of GPUs",
                shows="Share of each GPU's memory that is taken. A worker takes its pool when it starts.",
                act="Much below `--gpu-memory-utilization` on a GPU in use: memory lies idle that the pool could have.",
            ),
            GPU_SHARE,
            "{{instance}} GPU {{GpuIndex}}",
            unseen=NO_GPU,
        ),
    ],
)

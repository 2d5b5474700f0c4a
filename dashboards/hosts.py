"""The Workers dashboard's section about hosts, from Ray's agents: empty where Prometheus has no job for them (`make monitor`)."""

from typing import Unpack

from dashboards.panels import NO_LIMITS, Limits, Panel, Words, high_is_bad, lines

UNSEEN, NO_GPU = "no job `ray`", "no GPU seen"
GPU = "instance, GpuIndex"
USED = f"sum by ({GPU}) (ray_node_gram_used)"
NEARLY_FULL = high_is_bad(0.85, 0.95)


def _shares(
    title: str, query: str, legend: str, limits: Limits = NO_LIMITS, *, unseen: str = UNSEEN, **words: Unpack[Words]
) -> Panel:
    return lines(title, {legend: query}, "percentunit", maximum=1, limits=limits, width=6, **words).no_value(unseen)


HOSTS = [
    _shares(
        "CPU of hosts",
        "max by (instance) (ray_node_cpu_utilization) / 100",
        "{{instance}}",
        shows="Share of all cores that are busy. All hosts of the Ray cluster, whatever the variables.",
        act="Near 100 % with slow steps: something else runs there, or more ranks than cores.",
    ),
    _shares(
        "Memory of hosts",
        "max by (instance) (ray_node_mem_used / ray_node_mem_total)",
        "{{instance}}",
        NEARLY_FULL,
        shows="Share of each host's memory (of its pod's, on Kubernetes) that is taken. Dashed: 85 % and 95 %.",
        act="Near 100 %: processes are killed, see TransomRanksRestart. Fewer workers a host, or more memory.",
    ),
    _shares(
        "Busy GPUs",
        f"max by ({GPU}) (ray_node_gpus_utilization) / 100",
        "{{instance}} GPU {{GpuIndex}}",
        shows="Share of time in which a kernel ran on each GPU.",
        act="Low while requests wait: see *Step time by part*. One low among its worker's: compare hosts.",
        unseen=NO_GPU,
    ),
    _shares(
        "Memory of GPUs",
        f"{USED} / ({USED} + sum by ({GPU}) (ray_node_gram_available))",
        "{{instance}} GPU {{GpuIndex}}",
        shows="Share of each GPU's memory that is taken. A worker takes its pool when it starts.",
        act="Much below `--gpu-memory-utilization` on a GPU in use: memory lies idle that the pool could have.",
        unseen=NO_GPU,
    ),
]

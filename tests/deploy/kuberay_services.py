"""Services that KubeRay (1.5 and newer) makes for a RayService: their labels, their ports, and which pods they lead to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One service; `pods` are those that it leads to, by cluster and kind of node."""

    name: str
    labels: Mapping[str, str]
    ports: frozenset[str]
    pods: frozenset[tuple[str, str]]


def services(document: Mapping[str, Any], clusters: tuple[str, ...]) -> list[Service]:
    """All of them; the first cluster takes requests, a second one is on its way in or out."""
    name = document["metadata"]["name"]
    (head,) = document["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    ports = frozenset({port["name"] for port in head["ports"]} | {"metrics"})
    serving = frozenset(port for port in ports if port == "serve" or port.startswith("serve-"))
    of_the_service = {"ray.io/originated-from-cr-name": name, "ray.io/originated-from-crd": "RayService"}
    active = clusters[0]
    return [
        *(_head_service(cluster, ports) for cluster in clusters),
        Service(
            name=f"{name}-head-svc",
            labels={**of_the_service, "ray.io/node-type": "head", "ray.io/identifier": f"{name}-head"},
            ports=ports,
            pods=frozenset({(active, "head")}),
        ),
        Service(
            name=f"{name}-serve-svc",
            labels={**of_the_service, "ray.io/serve": f"{name}-serve"},
            ports=serving,
            pods=frozenset({(active, "head"), (active, "worker")}),
        ),
    ]


def _head_service(cluster: str, ports: frozenset[str]) -> Service:
    labels = {
        "ray.io/cluster": cluster,
        "ray.io/node-type": "head",
        "ray.io/identifier": f"{cluster}-head",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    return Service(name=f"{cluster}-head-svc", labels=labels, ports=ports, pods=frozenset({(cluster, "head")}))

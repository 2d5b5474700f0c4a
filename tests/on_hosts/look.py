"""Runs on the head: prints what the cluster looks like as one line of JSON, again whenever it has changed."""

import json
import os
import time
from typing import Any

import ray
from ray import serve
from ray.util import placement_group_table

PERIOD_S = 0.2


def main() -> None:
    """Run until the reader closes the pipe."""
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    last = None
    while os.getppid() != 1:
        if (now := look()) != last:
            print(json.dumps(now), flush=True)
        last = now
        time.sleep(PERIOD_S)


def look() -> dict[str, Any]:
    """Addresses of the hosts that are in the cluster, the hosts that each placed worker spans, and the app's state."""
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    spans = [sorted({nodes.get(node, "gone") for node in group["bundles_to_node_id"].values()}) for group in groups]
    return {"hosts": sorted(nodes.values()), "spans": sorted(spans), **app()}


def app() -> dict[str, Any]:
    """The app's status, and how many replicas of each deployment run."""
    found = serve.status().applications.get("transom")
    if found is None:
        return {"app": "NOT_DEPLOYED", "replicas": {}}
    replicas = {name: deployment.replica_states.get("RUNNING", 0) for name, deployment in found.deployments.items()}
    messages = [deployment.message[-1500:] for deployment in found.deployments.values() if deployment.message]
    return {"app": found.status.value, "replicas": replicas, "messages": messages}


if __name__ == "__main__":
    main()

"""Everything that a cluster with the Prometheus operator and Grafana's sidecar needs, from the same files as everywhere else.

    python deploy/monitoring/kubernetes.py | kubectl apply --server-side -f -

Server-side, so that no dashboard is kept a second time in an annotation. Needs PyYAML alone.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
DASHBOARDS = HERE.parents[1] / "dashboards/json"
NAME_LABEL = {"app.kubernetes.io/name": "transom"}


def main(words: Sequence[str]) -> None:
    """Print the objects."""
    given = arguments(words)
    labels = dict(pair.split("=", 1) for pair in given.label)
    found = objects(labels, given.sidecar_label, given.runbooks)
    if given.namespace:
        found = [{**one, "metadata": {**one["metadata"], "namespace": given.namespace}} for one in found]
    apart = json.loads(json.dumps(found))  # or YAML would refer from one object into another
    yaml.safe_dump_all(apart, sys.stdout, sort_keys=False, width=1000)


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--namespace", help="that of the RayService (default: kubectl's)")
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what your Prometheus selects monitors and rules by, such as release=kube-prometheus-stack; may be repeated",
    )
    parser.add_argument(
        "--sidecar-label", default="grafana_dashboard", help="what Grafana's sidecar looks for (default: %(default)s)"
    )
    parser.add_argument(
        "--runbooks",
        default="",
        metavar="URL",
        help="put before the alerts' runbook_url, such as a repository's address",
    )
    return parser.parse_args(words)


def objects(labels: dict[str, str], sidecar_label: str, runbooks: str) -> list[dict[str, Any]]:
    """The monitors, the PrometheusRule, and a ConfigMap for each dashboard."""
    monitors = list(yaml.safe_load_all((HERE / "monitors.yaml").read_text()))
    for monitor in monitors:
        monitor["metadata"]["labels"] = {**monitor["metadata"]["labels"], **labels}
    return [*monitors, rule({**NAME_LABEL, **labels}, runbooks), *dashboards({**NAME_LABEL, sidecar_label: "1"})]


def rule(labels: dict[str, str], runbooks: str) -> dict[str, Any]:
    """alerts.yml, which has the same shape inside."""
    groups = yaml.safe_load((HERE / "alerts.yml").read_text())["groups"]
    for one in (one for group in groups for one in group["rules"] if "alert" in one):
        one["annotations"] = {**one["annotations"], "runbook_url": runbooks + one["annotations"]["runbook_url"]}
    metadata = {"name": "transom", "labels": labels}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": metadata,
        "spec": {"groups": groups},
    }


def dashboards(labels: dict[str, str]) -> Iterator[dict[str, Any]]:
    """One for each file, so that none comes near the limit of a mebibyte."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        metadata = {"name": f"dashboard-{path.stem}", "labels": labels, "annotations": {"grafana_folder": "Transom"}}
        yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {path.name: path.read_text()}}


if __name__ == "__main__":
    main(sys.argv[1:])

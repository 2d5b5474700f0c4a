"""What the endpoint picker's configuration and the ScaledObject name: series of a live server, and plugins of the picker."""

import re
from typing import Any

import httpx
import yaml

from tests.cluster.engine_server import engine_server
from tests.deploy.deploy_files import DEPLOY, document
from transom_core.settings.settings import Settings

PICKER = document(DEPLOY / "gateway/endpoint_picker.yaml")
PODS: dict[str, Any] = {
    one["kind"]: one["spec"] for one in yaml.safe_load_all((DEPLOY / "gateway/pods.yaml").read_text())
}


def test_every_named_series_is_on_the_page_of_a_live_server(tiny_model) -> None:
    """A picker takes the first series of a name, so there must be one."""
    (extractor,) = [one for one in PICKER["plugins"] if one["type"] == "core-metrics-extractor"]
    (engine,) = extractor["parameters"]["engineConfigs"]
    queries = [trigger["metadata"]["query"] for trigger in PODS["ScaledObject"]["triggers"]]
    read = [value for name, value in engine.items() if name.endswith("Spec")]
    names = [*read, *(name for query in queries for name in re.findall(r"transom_\w+", query))]
    assert len(names) == 4
    with engine_server(tiny_model, kv_cache_memory_bytes="4MiB", num_threads=1) as server:
        page = httpx.get(f"{server.url}/metrics", timeout=120).text
    for name in names:
        assert len(re.findall(rf"^{name}{{[^}}]*}} \d", page, re.MULTILINE)) == 1, name
        assert f"# TYPE {name} gauge" in page


def test_references_lead_somewhere() -> None:
    types = {one["type"] for one in PICKER["plugins"]}
    (profile,), (source,) = PICKER["schedulingProfiles"], PICKER["dataLayer"]["sources"]
    assert {one["pluginRef"] for one in [*profile["plugins"], source, *source["extractors"]]} == types
    (container,) = PODS["Deployment"]["template"]["spec"]["containers"]
    command, model, *flags = container["args"]
    assert command == "serve"
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags[::2]]
    Settings.parse(model=model, **dict(zip(names, flags[1::2], strict=True)))

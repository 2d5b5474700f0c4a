"""What `make monitor` makes of the address that it is given."""

from __future__ import annotations

import pytest
import yaml
from scripts.monitor_settings import prometheus_configuration


@pytest.mark.parametrize(
    ("url", "job"),
    [
        ("http://127.0.0.1:8000", ("http", "127.0.0.1:8000", "/metrics")),
        ("https://llm.example/", ("https", "llm.example", "/metrics")),
        ("https://llm.example/inner/llm/", ("https", "llm.example", "/inner/llm/metrics")),
    ],
)
def test_the_address_may_have_a_prefix(url: str, job: tuple[str, str, str]) -> None:
    (made,) = yaml.safe_load(prometheus_configuration(url, ""))["scrape_configs"]
    ((address,),) = [targets["targets"] for targets in made["static_configs"]]
    assert (made["scheme"], address, made["metrics_path"]) == job

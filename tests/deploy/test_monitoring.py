"""Prometheus' configuration: its structure, and what promtool says where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.deploy.deploy_files import DEPLOY, document
from tests.prometheus_programs import run_promtool

MONITORING = DEPLOY / "monitoring"
PATH = MONITORING / "prometheus.yml"
LARGE = MONITORING / "prometheus_large.yml"
TOP = {"global", "rule_files", "scrape_configs"}
OF_A_JOB = {"job_name", "metrics_path", "static_configs", "http_sd_configs", "authorization"}


def problems(config: dict[str, Any]) -> list[str]:
    """Keys that are none of those in use here, and jobs without targets or with one name."""
    jobs = config.get("scrape_configs", [])
    unknown = [
        key for part, known in [(config, TOP), *((job, OF_A_JOB) for job in jobs)] for key in part if key not in known
    ]
    without = [job["job_name"] for job in jobs if not ("static_configs" in job or "http_sd_configs" in job)]
    names = [job["job_name"] for job in jobs]
    return [*unknown, *without, *{name for name in names if names.count(name) > 1}]


@pytest.mark.parametrize("path", [PATH, LARGE], ids=lambda path: path.name)
def test_it_is_valid(path: Path) -> None:
    config = document(path)
    assert problems(config) == []
    assert [job["job_name"] for job in config["scrape_configs"]] == ["transom", "ray"]
    assert all((MONITORING / name).exists() for name in config["rule_files"])


@pytest.mark.parametrize("path", [PATH, LARGE], ids=lambda path: path.name)
def test_promtool_takes_it(path: Path) -> None:
    run_promtool("check", "config", "--syntax-only", path)


def test_the_two_differ_only_in_how_processes_are_found() -> None:
    few, many = ({job["job_name"]: job for job in document(path)["scrape_configs"]} for path in (PATH, LARGE))
    assert few["ray"] == many["ray"]
    assert few["transom"]["authorization"] == many["transom"]["authorization"]
    (discovery,) = many["transom"]["http_sd_configs"]
    assert discovery["authorization"] == few["transom"]["authorization"]
    assert discovery["url"].endswith("/metrics/sd")


@pytest.mark.parametrize("path", [PATH, LARGE], ids=lambda path: path.name)
def test_every_key_says_that_it_is_a_bearers(path: Path) -> None:
    """Prometheus 2.42 sends discovery's key bare where no type is written, and gets 401."""
    jobs = document(path)["scrape_configs"]
    parts = [*jobs, *(discovery for job in jobs for discovery in job.get("http_sd_configs", []))]
    types = [part["authorization"].get("type") for part in parts if "authorization" in part]
    assert set(types) == {"Bearer"}
    assert all("authorization" in part for part in parts if "url" in part)

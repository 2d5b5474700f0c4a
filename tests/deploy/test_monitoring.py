"""Prometheus' configuration: promtool checks it where it is installed, and tests check its structure always."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.deploy_files import DEPLOY, document

MONITORING = DEPLOY / "monitoring"
PATH = MONITORING / "prometheus.yml"
LARGE = MONITORING / "prometheus_large.yml"
TOP = {"global", "rule_files", "scrape_configs"}
OF_A_JOB = {"job_name", "metrics_path", "static_configs", "http_sd_configs", "authorization"}
PROMTOOL = shutil.which("promtool")


def problems(config: dict[str, Any]) -> list[str]:
    """Keys that are none of those in use here, and jobs without targets or with one name."""
    jobs = config.get("scrape_configs", [])
    unknown = [
        key for part, known in [(config, TOP), *((job, OF_A_JOB) for job in jobs)] for key in part if key not in known
    ]
    without = [job["job_name"] for job in jobs if not ("static_configs" in job or "http_sd_configs" in job)]
    names = [job["job_name"] for job in jobs]
    return [*unknown, *without, *{name for name in names if names.count(name) > 1}]


def promtool(text: str) -> str:
    """What promtool says against it; empty where it is right or there is no promtool."""
    if PROMTOOL is None:
        return ""
    command = [PROMTOOL, "check", "config", "--syntax-only", "/dev/stdin"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=240, check=False)
    return done.stdout + done.stderr if done.returncode else ""


@pytest.mark.parametrize("path", [PATH, LARGE], ids=lambda path: path.name)
def test_it_is_valid(path: Path) -> None:
    config = document(path)
    assert problems(config) == []
    assert [job["job_name"] for job in config["scrape_configs"]] == ["transom", "ray"]
    assert all((MONITORING / name).exists() for name in config["rule_files"])
    assert promtool(path.read_text()) == ""


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


@pytest.mark.parametrize(("right", "wrong"), [("metrics_path", "metric_path"), ("http_sd_configs", "http_sd_config")])
def test_misspelt_keys_are_caught(right: str, wrong: str) -> None:
    text = PATH.read_text().replace(right, wrong)
    assert wrong in problems(yaml.safe_load(text))
    assert PROMTOOL is None or wrong in promtool(text)

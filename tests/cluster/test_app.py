"""The Serve app as it is deployed: its deployments, its resources, and the YAML that ships."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import yaml

from transom_worker.config import Settings
from transom_worker.errors import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, of pydantic
    from ray.serve import Application
    from ray.serve.schema import ServeDeploySchema

    from transom_cluster import app

YAML = Path(__file__).parents[2] / "deploy" / "serve.yaml"


def test_the_shipped_yaml_is_valid_and_builds():
    config = yaml.safe_load(YAML.read_text())
    schema = ServeDeploySchema.model_validate(config)
    assert schema.applications[0].import_path == "transom_cluster.app:build_app"
    assert isinstance(app.build_app(config["applications"][0]["args"]), Application)


def test_every_commented_setting_of_the_yaml_exists():
    commented = [line.split("# ", 1)[1] for line in YAML.read_text().splitlines() if line.startswith("      # ")]
    assert len(commented) >= 5
    Settings.parse(model="smollm2", **yaml.safe_load("\n".join(commented)))


def test_wrong_settings_are_refused_before_anything_is_deployed():
    with pytest.raises(ConfigError, match="no_such_flag"):
        app.build_app({"model": "smollm2", "no_such_flag": 1})


def test_an_empty_key_is_refused():
    with pytest.raises(ConfigError, match="--api-key is empty"):
        app.build_app({"model": "smollm2", "api_key": ["a", " "]})


@pytest.mark.parametrize("name", app.OUTSIDE_THE_APP)
def test_settings_of_the_proxies_are_not_ignored_in_silence(name):
    with pytest.raises(ConfigError, match=f"{name} is a setting of Serve's proxies"):
        app.build_app({"model": "smollm2", name: 1})


def test_a_cpu_worker_leaves_room_for_the_router_and_names_its_threads(monkeypatch):
    monkeypatch.setattr(app, "_cluster_has_gpu", lambda: False)
    options = app.worker_resources(Settings.parse(model="m"))
    cores = len(os.sched_getaffinity(0))
    assert options["num_cpus"] + app.ROUTER_CPUS <= cores
    assert "num_gpus" not in options
    assert options["runtime_env"]["env_vars"] == {"OMP_NUM_THREADS": str(cores), "OMP_WAIT_POLICY": "PASSIVE"}
    assert app.worker_resources(Settings.parse(model="m", num_threads=1))["num_cpus"] == 0.5
    assert app.worker_resources(Settings.parse(model="m", num_threads=10 * cores))["num_cpus"] <= cores


@pytest.mark.parametrize(("device", "in_cluster"), [("cuda", False), ("auto", True)])
def test_a_gpu_worker_asks_for_a_gpu(monkeypatch, device, in_cluster):
    monkeypatch.setattr(app, "_cluster_has_gpu", lambda: in_cluster)
    options = app.worker_resources(Settings.parse(model="m", device=device))
    assert (options["num_gpus"], options["num_cpus"]) == (1, 1)

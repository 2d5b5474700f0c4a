"""The Serve application: its deployments, their resources, and the Serve YAML in deploy/."""

import warnings
from pathlib import Path

import pytest
import yaml

from transom_cluster.serve.worker_resources import ClusterResources, worker_resources
from transom_core.errors import ConfigError
from transom_core.settings.settings import Settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, of pydantic
    from ray.serve import Application
    from ray.serve.schema import ServeDeploySchema

    from transom_cluster import app

YAML = Path(__file__).parents[3] / "deploy" / "serve.yaml"


def test_the_shipped_yaml_is_valid_and_builds():
    config = yaml.safe_load(YAML.read_text())
    assert ServeDeploySchema.model_validate(config).applications[0].import_path == "transom_cluster.app:build_app"
    assert isinstance(app.build_app(config["applications"][0]["args"]), Application)


def test_the_disaggregated_yaml_has_workers_of_two_roles():
    config = yaml.safe_load((YAML.parent / "serve-disaggregated.yaml").read_text())
    ServeDeploySchema.model_validate(config)
    first, (second,) = app.build_app(config["applications"][0]["args"])._bound_deployment.init_args[1:]
    deployments = [first._bound_deployment, second._bound_deployment]
    assert [one.name for one in deployments] == ["Worker", "Worker-1"]
    configs = [one.init_args[0] for one in deployments]
    assert [(one.role, one.ranks.size) for one in configs] == [("decode", 1), ("prefill", 2)]
    assert all(one.init_args[2] == ("Worker", "Worker-1") for one in deployments)
    assert [one.core_share.index for one in configs] == [0, deployments[0].num_replicas]


def test_routers_and_all_workers_get_the_commit_that_a_model_means_now(monkeypatch):
    """A worker that starts later would get a newer one, and compute something else."""
    monkeypatch.setattr(app, "with_commit", lambda name: f"{name}@abc")
    built = app.build_app({"model": "org/name", "worker_group": [{"role": "prefill"}]})._bound_deployment.init_args
    settings, first, (second,) = built
    assert (settings["model"], settings["served_model_name"]) == ("org/name@abc", ("org/name",))
    for worker in (first, second):
        config, model_name, _ = worker._bound_deployment.init_args
        assert (config.model.model, model_name) == ("org/name@abc", "org/name")


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("role=prefil", "worker_group.0.role is 'prefil'"),
        ("role", "'role' has no value"),
        ({"modle": "x"}, "worker_group.0.modle is not a setting"),
        ({"replicas": 0}, "worker_group.0.replicas is 0"),
    ],
)
def test_a_wrong_group_of_workers_is_named(group, message):
    with pytest.raises(ConfigError, match=message):
        Settings.parse(model="m", worker_group=[group])


def test_groups_of_workers_share_the_cores_and_other_settings():
    text = "role=prefill,replicas=2,tensor_parallel_size=2,kv_cache_memory_bytes=64MiB"
    settings = Settings.parse(model="m", role="decode", max_num_seqs=7, worker_group=[text])
    (group,) = settings.groups()
    assert (group.role, group.replicas, group.tensor_parallel_size, group.max_num_seqs) == ("prefill", 2, 2, 7)
    assert group.kv_cache_memory_bytes == 64 * 2**20
    machine = ClusterResources(node_cpus=(10.0,), num_gpus=0)
    alone = worker_resources(settings, machine, [group])
    assert alone.num_threads == worker_resources(group, machine, [settings]).num_threads == 2
    assert alone.workers_per_node == 3


@pytest.mark.parametrize("name", app.SERVE_PROXY_SETTINGS)
def test_settings_of_serves_proxies_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name} is a setting of Serve's proxies"):
        app.build_app({"model": "smollm2", name: 1})


def test_a_workers_engine_config_has_its_threads_and_ray_as_rank_launcher():
    settings = Settings.parse(model="m", tensor_parallel_size=2, num_threads=3)
    resources = worker_resources(settings, ClusterResources(node_cpus=(8.0,), num_gpus=0))
    config = app.worker_engine_config(settings, resources)
    assert (config.num_threads, config.ranks.size, config.ranks.launcher) == (3, 2, "ray")
    worker = app.worker_deployment(settings, resources)
    assert resources.bundles is not None
    assert worker.ray_actor_options["num_cpus"] == resources.bundles[0]["CPU"]
    assert worker._replica_config.placement_group_bundles == resources.bundles


@pytest.mark.parametrize(
    ("given", "num_gpus", "target_s"), [(None, 0, 0.2), (0, 0, None), (0.05, 0, 0.05), (None, 8, None)]
)
def test_a_worker_on_cpus_has_a_target_time_of_steps(given, num_gpus, target_s):
    settings = Settings.parse(model="m", target_step_s=given)
    resources = worker_resources(settings, ClusterResources(node_cpus=(8.0,), num_gpus=num_gpus))
    assert app.worker_engine_config(settings, resources).scheduler.target_step_s == target_s


@pytest.mark.parametrize(
    ("num_nodes", "replicas", "num_gpus", "count"), [(1, 1, 0, 1), (1, 3, 0, 3), (2, 3, 0, 2), (1, 3, 8, 1)]
)
def test_workers_of_a_node_share_its_cores(num_nodes, replicas, num_gpus, count):
    settings = Settings.parse(model="m", replicas=replicas)
    machines = ClusterResources(node_cpus=(8.0,) * num_nodes, num_gpus=num_gpus)
    assert app.worker_engine_config(settings, worker_resources(settings, machines)).core_share.count == count


def test_an_app_for_inherited_variables_gives_its_actors_no_runtime_environment():
    for build, has_any in ((app.build_app, True), (app.build_local_app, False)):
        (worker,) = build({"model": "smollm2"})._bound_deployment.init_args[1:]
        assert ("env_vars" in worker._bound_deployment.ray_actor_options.get("runtime_env", {})) is has_any


def test_deployments_have_the_requested_numbers_of_replicas():
    settings = Settings.parse(model="m", replicas=3, router_replicas=2, request_timeout_s=1000)
    assert app.router_deployment(settings).num_replicas == 2
    assert app.router_deployment(settings)._deployment_config.graceful_shutdown_timeout_s == 1000
    resources = worker_resources(settings, ClusterResources(node_cpus=(8.0,), num_gpus=0))
    assert app.worker_deployment(settings, resources).num_replicas == 3

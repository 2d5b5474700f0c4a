"""The command line up to where Ray would start."""

import json
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from typer.testing import CliRunner

from transom_cluster.cli import app
from transom_cluster.commands import local_ray, serve as serve_command
from transom_cluster.commands.process_tree import children_of, descendants_of, end_processes, is_running
from transom_core import __version__
from transom_core.config import ServerConfig
from transom_core.errors import ConfigError
from transom_core.settings.settings import Settings


def transom(*arguments: str, **env: str):
    return CliRunner().invoke(app, list(arguments), env=env)


@pytest.fixture(autouse=True)
def own_signal_handlers():
    """`transom serve` takes the signals of its process for good."""
    handlers = {number: signal.getsignal(number) for number in serve_command.ENDING_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_version_and_help():
    assert transom("version").stdout == f"transom {__version__}\n"
    text = transom("serve", "--help").stdout
    for name in Settings.model_fields:
        assert name == "model" or f"--{name.replace('_', '-')}" in text


def test_flags_are_settings(served_settings):
    flags = ["--max-num-seqs", "7", "--kv-cache-memory-bytes", "1MiB", "--no-enable-prefix-caching", "--haproxy"]
    result = transom("serve", "smollm2", *flags, "--api-key", "a", "--api-key", "b")
    assert result.exit_code == 0, result.output
    settings, given = served_settings[0]
    assert settings.kv_cache_memory_bytes == 2**20
    assert (settings.max_num_seqs, settings.enable_prefix_caching, settings.haproxy) == (7, False, True)
    assert (settings.api_key, settings) == (("a", "b"), Settings.parse(**given))
    named = {"model", "max_num_seqs", "kv_cache_memory_bytes", "enable_prefix_caching", "haproxy", "api_key"}
    assert given.keys() == named


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "smollm2", "--kv-cache-memory-bytes", "much"], "512MiB"),
        (["serve", "smollm2", "--max-num-seqs", "0"], "max_num_seqs"),
        (["serve", "smollm2", "--max-num-seqs", "many"], "--max-num-seqs"),
        (["serve", "smollm2", "--unknown", "1"], "--unknown"),
        (["bench", "offline", "--batches", "1,many"], "1,many"),
    ],
)
def test_refused_flags_exit_with_2_and_say_why(served_settings, arguments, said):
    result = transom(*arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output
    assert served_settings == []


@pytest.mark.usefixtures("without_ray")
def test_a_taken_port_is_refused_before_ray_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = transom("serve", "smollm2", "--port", port)
    assert result.exit_code == 1
    assert f"Port {port}" in result.output


@pytest.mark.parametrize(
    ("model", "flags", "said"),
    [
        ("/no/such/model", [], "/no/such/model"),
        ("gpt9", [], "gpt9"),
        ("smollm2", ["--max-model-len", "100000"], "8192"),
        ("smollm2", ["--host", "203.0.113.1"], "203.0.113.1"),
        ("smollm2", ["--device", "cuda", "--replicas", "99"], "--device cuda: "),
    ],
)
@pytest.mark.usefixtures("without_ray")
def test_what_does_not_fit_model_or_machine_is_refused_before_ray_starts(tmp_path, monkeypatch, model, flags, said):
    monkeypatch.chdir(tmp_path)
    Path("gpt9").mkdir()
    Path("gpt9/config.json").write_text('{"model_type": "gpt9"}')
    Path("gpt9/model.safetensors").touch()
    result = transom("serve", model, "--port", "0", *flags)
    assert result.exit_code == 1
    assert said in result.output
    assert "Traceback" not in result.output


def test_offline_figures_as_json(tiny_model, monkeypatch):
    # for the other tests' sake
    monkeypatch.setattr("transom_worker.execution.setup.model_setup.set_threads", lambda _, **ranks: None)
    sizes = ("--batches", "1,2", "--output-tokens", "3", "--repeats", "1", "--json")
    result = transom("bench", "offline", str(tiny_model), "--prompt-tokens", "20", *sizes)
    assert result.exit_code == 0, result.output
    assert [point["batch"] for point in json.loads(result.stdout.splitlines()[-1])["decode"]] == [1, 2]
    result = transom("bench", "offline", str(tiny_model), "--prompt-tokens", "5000", *sizes)
    assert result.exit_code == 2
    assert "5000 prompt" in result.output


def test_signal_handlers_are_restored_after_rays_start():
    """Ray makes SIGTERM a SystemExit in Python and a stack dump below it."""
    before = signal.getsignal(signal.SIGTERM)
    with local_ray.keep_signal_handlers():
        child = subprocess.Popen(["sleep", "600"])  # a process of Ray
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    child.send_signal(signal.SIGHUP)
    child.terminate()
    assert child.wait() == -signal.SIGTERM
    with pytest.raises(KeyboardInterrupt), local_ray.keep_signal_handlers():
        sys.exit(15)


def test_the_server_ends_when_a_process_of_ray_does(monkeypatch):
    daemon = subprocess.Popen(["sleep", "600"])

    def look_and_kill(_):
        found = [p for p in children_of(os.getpid()) if p.pid == daemon.pid]
        daemon.kill()  # not before it was seen
        return found

    monkeypatch.setattr(local_ray, "children_of", look_and_kill)
    monkeypatch.setattr(local_ray, "WATCH_S", 0.01)
    local_ray.LocalRay(Settings.parse(model="m")).wait()
    assert daemon.wait(120) == -signal.SIGKILL


def test_the_reason_of_a_failed_deployment_is_found_in_serves_message():
    message = (
        "The deployment failed to start 1 times in a row. Error:\nTraceback (most recent call last):\n"
        '  File "x.py", line 1, in f\ntransom_core.errors.ModelError: no tensor named x in y.\n'
    )
    assert local_ray.failure_reason(["", message]) == "no tensor named x in y."
    assert "killed" in local_ray.failure_reason(["the worker was killed"])


def test_descendants_are_found_and_killed():
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    below = descendants_of(parent.pid)
    assert [process.pid for process in below] == [grandchild]
    end_processes(below)
    assert parent.wait(120) == 0
    end_processes(below)  # they have ended: there is nothing to kill
    assert not is_running(below[0])
    parent.stdout.close()


@pytest.fixture
def of_a_terminal():
    """SIGHUP is not ignored, even if the tests run under nohup."""
    given = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, given)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_end_of_its_terminal_ends_a_server_as_sigterm_does(of_a_terminal, monkeypatch, number):
    """Requests end first, and everything is stopped, even if nothing can be printed any more."""

    def wait():
        os.kill(os.getpid(), number)
        raise AssertionError("the signal has no handler")

    cluster = Mock()
    cluster.wait.side_effect = wait
    monkeypatch.setattr(serve_command, "LocalRay", lambda _: cluster)
    for name in ("check_start", "_wait_for_first_response", "_print_welcome"):
        monkeypatch.setattr(serve_command, name, Mock())
    monkeypatch.setattr("typer.echo", Mock(side_effect=OSError("Input/output error")))
    assert serve_command.run_server(Settings.parse(model="m"), {}) == 0
    assert [name for name, *_ in cluster.method_calls] == ["start", "wait", "drain", "write_caches", "stop"]


@pytest.mark.parametrize("writes_text", [True, False])
def test_first_requests_fit_the_model_and_the_clients_limit(monkeypatch, writes_text):
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            asked.append((request.url.path, json.loads(request.content)["model"]))
            return httpx.Response(200 if len(asked) < 3 else 429)
        return httpx.Response(200, json={"status": "ok", "workers": [{"state": "open"}]})

    client = partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr("transom_cluster.commands.serve.httpx.Client", client)
    adapters = tuple((name, f"/{name}") for name in "abc")
    config = ServerConfig(served_model_name="m", lora_modules=adapters)
    cluster = Mock(local_url="http://localhost")
    assert serve_command._wait_for_first_response(cluster, config, writes_text=writes_text) == [{"state": "open"}]
    path = "/v1/completions" if writes_text else "/v1/embeddings"
    assert asked == [(path, "m"), (path, "a"), (path, "b")]


def test_a_server_under_nohup_outlives_its_terminal(of_a_terminal, monkeypatch):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def cluster(_):
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        return Mock()

    monkeypatch.setattr(serve_command, "LocalRay", cluster)
    monkeypatch.setattr(serve_command, "check_start", Mock(side_effect=ConfigError("no model")))
    assert serve_command.run_server(Settings.parse(model="m"), {}) == serve_command.START_FAILED

"""The command line up to where Ray would start, and `transom chat` against a real server."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from transom_cluster import __version__, local_ray, serve_command
from transom_cluster.chat_repl import ChatFailed, ChatSession, run_chat
from transom_cluster.cli import app
from transom_cluster.process_tree import Process, end_processes, processes_below
from transom_worker.config import Settings


def transom(*arguments: str, **env: str):
    return CliRunner().invoke(app, list(arguments), env=env)


@pytest.fixture
def served(monkeypatch):
    """What `transom serve` would start: (settings, given values)."""
    calls = []
    monkeypatch.setattr(serve_command, "run_server", lambda settings, given: calls.append((settings, given)) or 0)
    return calls


def test_version_and_help():
    assert transom("version").stdout == f"transom {__version__}\n"
    text = transom("serve", "--help").stdout
    for name in Settings.model_fields:
        assert name == "model" or f"--{name.replace('_', '-')}" in text


def test_flags_are_settings(served):
    flags = ["--max-num-seqs", "7", "--kv-cache-memory-bytes", "1MiB", "--no-enable-prefix-caching", "--haproxy"]
    result = transom("serve", "smollm2", *flags, "--api-key", "a", "--api-key", "b")
    assert result.exit_code == 0, result.output
    settings, given = served[0]
    assert settings.kv_cache_memory_bytes == 2**20
    assert (settings.max_num_seqs, settings.enable_prefix_caching, settings.haproxy) == (7, False, True)
    assert settings.api_key == ("a", "b")
    assert Settings.parse(**given) == settings
    assert given.keys() == {
        "model",
        "max_num_seqs",
        "kv_cache_memory_bytes",
        "enable_prefix_caching",
        "haproxy",
        "api_key",
    }


def test_the_api_key_may_come_from_the_environment(served):
    transom("serve", "smollm2", TRANSOM_API_KEY="secret")
    assert served[0][0].api_key == ("secret",)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dtype", "int3"], "dtype"),
        (["--replicas", "2"], "--replicas 2 is not supported yet"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size"),
        (["--kv-cache-memory-bytes", "much"], "512MiB"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--max-num-seqs", "many"], "--max-num-seqs"),
        (["--unknown", "1"], "--unknown"),
    ],
)
def test_refused_flags_exit_with_2_and_say_why(served, flags, said):
    result = transom("serve", "smollm2", *flags)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output
    assert served == []


def test_what_is_wrong_at_once_is_said_before_anything_starts(monkeypatch):
    monkeypatch.setattr(local_ray.LocalRay, "_start_ray", lambda self: pytest.fail("Ray was started"))
    result = transom("serve", "/no/such/model", "--port", "0")
    assert result.exit_code == 1
    assert "/no/such/model" in result.output
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = transom("serve", "smollm2", "--port", port)
    assert result.exit_code == 1
    assert f"Port {port}" in result.output


def test_a_failed_deployment_is_told_by_its_reason():
    message = "\n".join(
        [
            "The deployment failed to start 1 times in a row. Error:",
            "Traceback (most recent call last):",
            '  File "x.py", line 1, in f',
            "transom_worker.errors.ModelError: no tensor named x in y.",
            "",
        ]
    )
    assert local_ray._reason(["", message]) == "no tensor named x in y."
    assert "killed" in local_ray._reason(["the worker was killed"])


def test_processes_that_were_started_are_found_and_ended():
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    below = processes_below(parent.pid)
    assert [process.pid for process in below] == [grandchild]
    end_processes([Process(below[0].pid, below[0].start_ticks - 1)])  # an earlier owner of that pid: nothing to end
    assert processes_below(parent.pid) == below
    end_processes(below)
    assert parent.wait(10) == 0
    parent.stdout.close()


def test_chat_session(server):
    session = ChatSession(url=server.url, system="be brief", options={"max_tokens": 3, "seed": None})
    assert session.connect() == "stub"
    assert "".join(session.ask("hi")) == "abc"
    assert [message["role"] for message in session.messages] == ["system", "user", "assistant"]
    pieces = session.ask("more")
    next(pieces)
    pieces.close()  # what Ctrl-C does
    assert session.messages[-1]["role"] == "assistant"
    session.reset()
    assert [message["role"] for message in session.messages] == ["system"]


def test_chat_failures_leave_the_conversation_as_it_was(server):
    session = ChatSession(url=server.url, options={"temperature": 999})
    with pytest.raises(ChatFailed, match="temperature"):
        list(session.ask("hi"))
    assert session.messages == []
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ChatFailed, match="does not answer"):
            ChatSession(url=f"http://127.0.0.1:{unused.getsockname()[1]}").connect()


def test_chat_loop(server, monkeypatch, capsys):
    lines = iter(["hi", "", "/what", "/reset", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert run_chat(ChatSession(url=server.url, options={"max_tokens": 2})) == 0
    out = capsys.readouterr().out
    assert "stub at" in out
    assert "\nab\n" in out

"""Agents and client libraries that others wrote, unchanged, against a server of the demo model on loopback.

They run as programs of their own, in the environment at `TRANSOM_CLIENTS` (`make test-clients` makes it): their dependencies are
not those of this project. Each prints a line for every check that holds.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_classifier
from tests.clients.forced_tool import ForcedTool
from tests.cluster.engine_server import EngineServer, engine_server

pytestmark = pytest.mark.clients

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 550
SMALL: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "32MiB"}
COMMAND = "echo transom-was-here > proof.txt"
CODEX_CONFIG = """
model = "tiny"
model_provider = "transom"
model_instructions_file = "instructions.md"
web_search = "disabled"
model_context_window = 8192
project_doc_max_bytes = 0
include_permissions_instructions = false
include_apps_instructions = false
include_environment_context = false
[features]
multi_agent = false
goals = false
apps = false
[model_providers.transom]
name = "Transom"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
stream_idle_timeout_ms = 500000
"""


@pytest.fixture(scope="module")
def clients() -> Path:
    """The environment that has the clients."""
    path = os.environ.get("TRANSOM_CLIENTS")
    assert path, "Run `make test-clients`, or set TRANSOM_CLIENTS to the environment that scripts/clients has made."
    return Path(path)


@pytest.fixture(scope="module")
def served() -> Iterator[EngineServer]:
    with engine_server("smollm2", dtype="float32", kv_cache_memory_bytes="512MiB") as server:
        yield server


def checks_of(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> list[str]:
    """What a program says has held."""
    return [json.loads(line)["check"] for line in run(*command, cwd=cwd, env=env).splitlines()]


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_openai_agents(clients: Path, served: EngineServer, tmp_path: Path) -> None:
    assert len(checks_of(clients / "bin/python", PROGRAMS / "agents_turns.py", served.url, cwd=tmp_path)) == 6


def test_langchain_openai(clients: Path, served: EngineServer, tmp_path: Path) -> None:
    assert len(checks_of(clients / "bin/python", PROGRAMS / "langchain_calls.py", served.url, cwd=tmp_path)) == 14


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Iterator[EngineServer]:
    with engine_server(tiny_model, **SMALL) as server:
        yield server


def test_litellm(clients: Path, tiny: EngineServer, tiny_model: Path, tmp_path: Path) -> None:
    make_classifier(classifier := tmp_path / "classifier", tiny_model)
    with engine_server(classifier, **SMALL) as scorer:
        program = clients / "bin/python", PROGRAMS / "litellm_calls.py"
        assert len(checks_of(*program, tiny.url, scorer.url, cwd=tmp_path)) == 13


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm(clients: Path, tiny: EngineServer, tiny_model: Path, tmp_path: Path, path: str) -> None:
    run(
        *(clients / "bin/guidellm", "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={tiny.url},model=tiny,request_format={path}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
        *("--tokenizer", f"kind=huggingface_auto,model={tiny_model}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8", "--output", "kind=json,path=report.json"),
        cwd=tmp_path,
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    answers = benchmark["requests"]
    assert [one["output_metrics"]["text_tokens"] for one in answers["successful"]] == [8] * 6
    assert answers["errored"] == answers["incomplete"] == []


@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_vllm_bench_serve(
    clients: Path, tiny: EngineServer, tiny_model: Path, tmp_path: Path, backend: str, path: str
) -> None:
    run(
        *(clients / "bin/vllm", "bench", "serve", "--backend", backend, "--base-url", tiny.url, "--endpoint", path),
        *("--model", "tiny", "--tokenizer", tiny_model, "--num-prompts", "6", "--ignore-eos"),
        *("--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "8"),
        *("--save-result", "--result-filename", "report.json"),
        cwd=tmp_path,
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["completed"], report["failed"], report["total_output_tokens"]) == (6, 0, 48)


def test_ai_sdk(clients: Path, served: EngineServer, tmp_path: Path) -> None:
    program = tmp_path / "ai_sdk.mjs"  # modules are looked up beside the program
    program.write_bytes((PROGRAMS / "ai_sdk.mjs").read_bytes())
    (tmp_path / "node_modules").symlink_to(clients / "node_modules")
    assert len(checks_of("node", program, served.url, cwd=tmp_path)) == 6


def test_codex_completes_a_turn_with_a_shell_call(clients: Path, tmp_path: Path) -> None:
    """The call and the last answer are forced: see `ForcedTool`, and Codex's own `--output-schema`."""
    made: list[ForcedTool] = []

    def forced(app: Any) -> ForcedTool:
        made.append(ForcedTool(app, "exec_command", {"cmd": COMMAND}))
        return made[0]

    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (home / "instructions.md").write_text("You are a coding agent. Answer briefly.")
    schema = {"type": "object", "properties": {"result": {"type": "string", "enum": ["written"]}}}
    (home / "schema.json").write_text(json.dumps({**schema, "required": ["result"], "additionalProperties": False}))
    with engine_server("smollm2", dtype="float32", kv_cache_memory_bytes="512MiB", wrap=forced) as server:
        (home / "config.toml").write_text(CODEX_CONFIG.format(url=server.url))
        codex = run(clients / "bin/python", "-c", "import codex_cli_bin; print(codex_cli_bin.__path__[0])", cwd=work)
        said = run(
            Path(codex.strip()) / "bin/codex",
            *("exec", "--json", "--skip-git-repo-check", "-s", "danger-full-access"),
            *("--output-schema", home / "schema.json", "Write a proof."),
            cwd=work,
            env={"HOME": str(home), "CODEX_HOME": str(home)},
        )
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    (command,) = [item for item in items if item["type"] == "command_execution"]
    assert (COMMAND in command["command"], command["exit_code"]) == (True, 0)
    assert (work / "proof.txt").read_text() == "transom-was-here\n"
    (message,) = [item for item in items if item["type"] == "agent_message"]
    assert json.loads(message["text"]) == {"result": "written"}
    assert events[-1]["type"] == "turn.completed"
    assert made[0].num_forced == 1
    first, second = made[0].bodies
    assert first["tool_choice"] == "auto"
    (output,) = [item for item in second["input"] if item["type"] == "function_call_output"]
    (call,) = [item for item in second["input"] if item["type"] == "function_call"]
    assert output["call_id"] == call["call_id"]

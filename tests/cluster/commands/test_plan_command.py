"""`transom plan` on model configs, files and wrong arguments."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.checkpoints import SIZES, make_checkpoint
from tests.worker.planner.model_configs import CONFIGS
from transom_cluster.cli import app
from transom_cluster.commands.plan_report import readable
from transom_worker.planner.plan import plan_from_config

CONFIG = SIZES | {
    "model_type": "gpt_oss",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "dtype": "bfloat16",
}


def plan(*arguments: object):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Its path has brackets, which are no markup."""
    made = tmp_path / "a[" / "b]"
    made.mkdir(parents=True)
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


@pytest.mark.parametrize(("gpu_memory", "step_tokens"), [(None, 1024), ("24GiB", 2048), ("80GiB", 8192)])
def test_json_has_the_planners_integers(folder: Path, gpu_memory: str | None, step_tokens: int) -> None:
    sizes = ("--memory", "8MiB", "--max-model-len", "6000", "--tensor-parallel-size", "2")
    flags = [*sizes, "--kv-cache-dtype", "fp8", "--json"]
    if gpu_memory is not None:
        flags += ["--gpu-memory", gpu_memory]
    result = plan(folder, *flags)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    expected = plan_from_config(
        CONFIG,
        memory_bytes=8 * 2**20,
        max_model_len=6000,
        tensor_parallel_size=2,
        kv_cache_dtype="fp8",
        max_num_batched_tokens=step_tokens,  # as a worker on such a device has (test_startup)
        steps_in_flight=2,  # as several ranks have
    )
    assert found == {"model": str(folder), "kv_policy": None, **expected.as_json()}
    assert [group["name"] for group in found["groups"]] == ["full", "window_128"]
    assert found["groups"][0]["block_bytes"] == 2 * 16 * 2 * (16 + 4) * 2
    assert [point["length"] for point in found["concurrency"]] == [1024, 4096, 6000]


def test_the_table_has_the_same_integers(folder: Path) -> None:
    result = plan(folder / "config.json", "--memory", "64MiB")
    assert result.exit_code == 0, result.output
    assert "a[/b]" in result.output.replace("\n", "")
    expected = plan_from_config(CONFIG, memory_bytes=64 * 2**20, max_num_batched_tokens=1024)
    lines = result.stdout.splitlines()
    (group,) = [line.split() for line in lines if "window_128" in line]
    assert group == ["window_128", "2", "bfloat16", "512", "16", "8,192", "1", "0.00%", "9", "9", "64"]
    assert f"{expected.num_pages:,} pages of {expected.page_bytes:,} bytes" in result.stdout
    assert "restored exactly by computing 254 tokens again" in result.stdout
    longest = expected.concurrency[-1]
    row = lines[-2].split() if not lines[-1].strip() else lines[-1].split()
    at_once = [str(longest.requests), str(longest.requests_with_budget)]
    assert row == ["8,192", *readable(longest.request_bytes).split(), *at_once]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nix"], "There is no model 'nix'"),
        (["."], "config.json is missing"),
        (["config.json", "--memory", "much"], "--memory is 'much'; give bytes, or a size such as"),
        (["config.json", "--memory", "5"], "cannot hold one block of each of 2 cache group"),
        (["config.json", "--max-model-len", "9000"], "--max-model-len is 9000; the model reaches 8192"),
        (["config.json", "--kv-cache-dtype", "int3"], "--kv-cache-dtype is 'int3', and 'int3' is no format; give auto"),
        (["config.json", "--tensor-parallel-size", "9"], "has 8 query heads, which stay whole. Give at most 8"),
        (["other.json"], "model_type 'bert'"),
    ],
)
def test_mistakes_are_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], message: str
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "config.json").write_text(json.dumps(CONFIG))
    (models / "other.json").write_text(json.dumps(CONFIG | {"model_type": "bert"}))
    monkeypatch.chdir(tmp_path if arguments == ["."] else models)
    result = plan(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_kv_policy_says_how_many_requests_fit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-3-8b"]))
    policy = '{"type": "window", "sinks": 4, "window": 512}'
    flags = ("--memory", "8GiB", "--json")
    full, window = (json.loads(plan(tmp_path, *flags, *more).stdout) for more in ((), ("--kv-policy", policy)))
    assert window["kv_policy"] == "window sinks=4 window=512"
    assert window["concurrency"][-1]["requests"] > 10 * full["concurrency"][-1]["requests"]
    blocks = 1 + 33  # a sink block, and the window's wherever it begins in a block, the one that is filled included
    assert {point["request_bytes"] for point in window["concurrency"]} == {blocks * window["groups"][0]["stride_bytes"]}
    assert window["groups"][0]["peak_blocks"] == blocks


@pytest.mark.parametrize(
    ("config", "policy", "message"),
    [
        ("llama-3-8b", "window", "--kv-policy is not JSON"),
        ("llama-3-8b", '{"type": "heavy", "budget": 40}', "kv_policy.budget is 40"),
        ("gpt-oss-20b", '{"type": "window", "window": 512}', "12 of its 24 layers have sliding windows"),
    ],
)
def test_a_wrong_kv_policy_is_one_line(tmp_path: Path, config: str, policy: str, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[config]))
    result = plan(tmp_path, "--memory", "8GiB", "--kv-policy", policy)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_weights_of_each_rank(tmp_path: Path) -> None:
    """`test_quantised_models` compares the integers with those of loaded models."""
    folder = make_checkpoint(tmp_path, "llama")
    arguments = (folder, "--memory", "64MiB", "--tensor-parallel-size", 2, "--weights")
    weights = json.loads(plan(*arguments, "cpu", "--json").output)["weights"]
    assert weights["device"] == "cpu"
    assert len(weights["rank_bytes"]) == 2
    # both hold the norms, and the file a header
    assert 0.99 < sum(weights["rank_bytes"]) / weights["file_bytes"] < 1.01
    text = plan(*arguments, "cuda").output.replace("\n", " ")
    assert f"Weights on CUDA, bytes of each rank: {weights['rank_bytes'][0]:,} (" in text
    assert "--weights is disk; give cpu or cuda" in plan(*arguments, "disk").output
    (folder / "model.safetensors").unlink()
    assert "has no .safetensors file" in plan(*arguments, "cpu").output.replace("\n", " ")

"""What is downloaded of a model on the hub, counted at a stand-in for it with huggingface_hub's own client."""

import functools
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from tests.hub_server import COMMIT, HubServer, hub_server
from transom_core.errors import ModelError
from transom_core.model_files import hub
from transom_core.model_files.resolve import resolve_config, resolve_model, resolve_text_files, with_commit

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}}
TEXT = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b'{"top_k": 5}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"eos_token": "x"}',
    "chat_template.jinja": b"x",
    "additional_chat_templates/tool_use.jinja": b"y",
}
OTHERS = {
    "README.md": b"#",
    "original/config.json": b"{}",
    "original/model.safetensors": b"o" * 70_000,
    "metal/model.bin": b"m" * 50_000,
    "consolidated.safetensors": b"c" * 90_000,
    "consolidated-00001.safetensors": b"c" * 90_000,
    "pytorch_model.bin": b"p" * 80_000,
    "modeling_custom.py": b"raise SystemExit",
}


@pytest.fixture
def gpt_oss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A repository with the weights twice, as gpt-oss and Mistral have them."""
    shards = {name: bytes([at]) * 300_000 for at, name in enumerate(SHARDS)}
    index = {"model.safetensors.index.json": json.dumps(INDEX).encode()}
    with hub_server({**TEXT, **OTHERS, **index, **shards}) as server:
        use(server, monkeypatch, tmp_path / "cache")
        yield server


def use(server: HubServer, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    download = functools.partial(huggingface_hub.snapshot_download, endpoint=server.url, cache_dir=cache, token=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)  # what it writes at once
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda s: None)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda s: None)


def test_a_worker_downloads_the_weights_that_the_index_names_once(gpt_oss: HubServer) -> None:
    files = resolve_model("org/name")
    wanted = {*TEXT, "model.safetensors.index.json", *SHARDS}
    assert gpt_oss.num_bytes == {name: len(gpt_oss.files[name]) for name in wanted}
    assert {str(path.relative_to(files.path)) for path in files.path.rglob("*") if path.is_file()} == wanted
    assert resolve_model("org/name").path == files.path
    assert gpt_oss.num_bytes.total() == sum(len(gpt_oss.files[name]) for name in wanted)


def test_a_router_downloads_no_weights(gpt_oss: HubServer) -> None:
    files = resolve_text_files("org/name")
    assert (files.config["model_type"], files.is_gguf) == ("llama", False)
    assert gpt_oss.num_bytes == {name: len(content) for name, content in TEXT.items()}


def test_an_id_gets_its_commit_once_and_keeps_it(gpt_oss: HubServer) -> None:
    name = with_commit("org/name")
    assert (name, with_commit(name)) == (f"org/name@{COMMIT}",) * 2
    assert list(gpt_oss.num_bytes) == ["config.json"]
    assert resolve_model(name).path.name == COMMIT
    assert resolve_config(name) == {"model_type": "llama"}
    with pytest.raises(ModelError, match="org/name has no revision 'v9'"):
        resolve_text_files("org/name@v9")


@pytest.mark.parametrize("name", ["smollm2", ".", "no-such-model"])
def test_other_names_have_no_commit(name: str) -> None:
    assert with_commit(name) == name


@pytest.mark.parametrize(
    ("weights", "downloaded"),
    [(("model", "other"), "model"), (("part-1",), "part-1")],
    ids=["the one file is enough", "of other names, in the repository's own folder"],
)
def test_weights_without_an_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, weights: tuple[str, ...], downloaded: str
) -> None:
    with hub_server({**TEXT, **OTHERS, **{f"{name}.safetensors": b"w" * 1000 for name in weights}}) as server:
        use(server, monkeypatch, tmp_path)
        resolve_model("org/name")
        assert set(server.num_bytes) == {*TEXT, f"{downloaded}.safetensors"}


def test_a_repository_with_pickles_alone_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with hub_server({**TEXT, "pytorch_model.bin": b"p"}) as server:
        use(server, monkeypatch, tmp_path)
        with pytest.raises(ModelError, match=r"has no \.safetensors file"):
            resolve_model("org/name")
        assert "pytorch_model.bin" not in server.num_bytes


def test_an_index_that_names_files_elsewhere_is_refused(gpt_oss: HubServer) -> None:
    evil = {"weight_map": {"a": "../../etc/passwd.safetensors"}}
    gpt_oss.files["model.safetensors.index.json"] = json.dumps(evil).encode()
    with pytest.raises(ModelError, match="must lie in the folder itself"):
        resolve_model("org/name")


def test_a_connection_that_breaks_is_opened_again_where_it_ended(gpt_oss: HubServer) -> None:
    gpt_oss.cut_at[SHARDS[0]] = 100_000
    files = resolve_model("org/name")
    assert (files.path / SHARDS[0]).read_bytes() == gpt_oss.files[SHARDS[0]]
    assert len(gpt_oss.ranges[SHARDS[0]]) == 2
    assert gpt_oss.num_bytes[SHARDS[0]] <= 300_000 + 10_000  # but for what the client had not written yet


def test_a_download_that_broke_off_keeps_its_whole_files_at_the_next_start(gpt_oss: HubServer) -> None:
    resolve_text_files("org/name")
    gpt_oss.cut_at[SHARDS[1]] = 100_000
    gpt_oss.goes_down_after_cut = True
    with pytest.raises(ModelError, match=r"could not be downloaded.*start again"):
        resolve_model("org/name")
    gpt_oss.is_down = False
    files = resolve_model("org/name")
    assert (files.path / SHARDS[1]).read_bytes() == gpt_oss.files[SHARDS[1]]
    assert {name: gpt_oss.num_bytes[name] for name in TEXT} == {name: len(content) for name, content in TEXT.items()}
    assert gpt_oss.num_bytes[SHARDS[1]] == 400_000


def test_a_process_without_a_terminal_logs_how_far_it_is(
    gpt_oss: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub, "LOG_PERIOD_S", 0.0)
    with caplog.at_level(logging.INFO, logger="transom.worker"):
        resolve_model("org/name")
    lines = [record.getMessage() for record in caplog.records if "Downloading org/name" in record.getMessage()]
    assert lines
    assert all(line.endswith("GB.") for line in lines)

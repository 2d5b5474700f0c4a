"""DeepSeek V4 checkpoints as they are published, the published ratios, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from deepseek_v4_checkpoint import HEAVY, SPARSE, make_deepseek_v4
from safetensors.torch import load_file, save_file

from checkpoints import greedy, load_oracle, prompt
from engine_driver import make_engine, make_request, run
from transom_worker.errors import ConfigError, ModelError
from transom_worker.model_files import resolve_model
from transom_worker.models.architecture import read_architecture, runnable
from transom_worker.models.deepseek_v4.names import published_name

LENGTHS = (127, 128, 129, 300)
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Entries of 4 and 128 tokens."""
    return make_deepseek_v4(
        tmp_path_factory.mktemp("deepseek_v4_published"), compress_rates={SPARSE: 4, HEAVY: 128}, index_topk=40
    )


def publish(folder: Path, target: Path) -> Path:
    """The same checkpoint by the published files' tensor names and config keys."""
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    renamed = {published_name(name): tensor for name, tensor in tensors.items()}
    assert len(renamed) == len(tensors)
    assert {"embed.weight", "head.weight", "hc_head_fn", "norm.weight", "layers.0.attn.kv_norm.weight"} <= set(renamed)
    save_file(renamed, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    ratios = {"sliding_attention": 0, SPARSE: 4, HEAVY: 128}
    config["compress_ratios"] = [*(ratios[kind] for kind in config.pop("layer_types")), 0]
    config["num_hash_layers"] = config.pop("mlp_layer_types").count("hash_moe")
    scaling = config.pop("rope_parameters")["compress"]
    config["rope_scaling"] = {
        name: scaling[name] for name in ("rope_type", "factor", "original_max_position_embeddings")
    }
    for name in ("compress_rates", "partial_rotary_factor"):
        del config[name]
    (target / "config.json").write_text(json.dumps(config))
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (target / file.name).write_bytes(file.read_bytes())
    return target


def test_published_names_ratios_and_config(folder: Path, tmp_path: Path) -> None:
    oracle = load_oracle(folder)
    answers = [greedy(oracle, prompt(length), NUM_TOKENS).token_ids for length in LENGTHS]
    for place in (folder, publish(folder, tmp_path / "published")):
        engine = make_engine(str(place), dtype="float32", max_num_batched_tokens=200, block_size=16)
        for way in ("cold", "hit"):
            requests = [make_request(f"{way}{i}", prompt(n), max_tokens=NUM_TOKENS) for i, n in enumerate(LENGTHS)]
            found = run(engine, requests)
            assert [answer.token_ids for answer in found] == answers
        assert [answer.num_cached_tokens for answer in found] == [112, 112, 128, 288]


def test_in_bfloat16_it_is_as_close_to_float32_as_transformers(folder: Path) -> None:
    ids = prompt(300)
    with torch.inference_mode():
        exact, theirs = (
            load_oracle(folder, dtype=dtype)(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
            for dtype in (torch.float32, torch.bfloat16)
        )
    engine = make_engine(str(folder), dtype="bfloat16", block_size=16)
    engine.add(make_request("a", ids, max_tokens=1, prompt_logprobs=20))
    events = []
    while engine.has_work:
        events += engine.step()
    (steps,) = [event.prompt_logprobs for event in events if event.prompt_logprobs]
    errors = {"ours": 0.0, "theirs": 0.0}
    for position, step in enumerate(steps[1:]):
        tokens = [logprob.token_id for logprob in (step.chosen, *step.top)]
        ours = torch.tensor([logprob.logprob for logprob in (step.chosen, *step.top)])
        errors["ours"] += float((ours - exact[position, tokens]).abs().mean())
        errors["theirs"] += float((theirs[position, tokens] - exact[position, tokens]).abs().mean())
    assert errors["ours"] < 1.3 * errors["theirs"], errors


def test_a_missing_tensor_is_named_as_the_checkpoint_would(folder: Path, tmp_path: Path) -> None:
    broken = publish(folder, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    del tensors["layers.1.attn.indexer.compressor.ape"]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ModelError, match=r"has no tensor 'layers\.1\.attn\.indexer\.compressor\.ape'"):
        make_engine(str(broken))


def test_sinks_and_wrong_values_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--sinks and --chunk were given; deepseek_v4 layers have windows only"):
        make_engine(str(folder), window=16, sinks=4)
    config = resolve_model(str(folder)).config
    assert runnable(read_architecture(config)).deepseek_v4.hashed == (True, True, False, False)
    for change, message in (
        ({"scoring_func": "tanh"}, "scoring_func is 'tanh'"),
        ({"mlp_layer_types": ["moe"]}, "for each of 4 layers"),
        ({"q_lora_rank": "many"}, "no size or number"),
    ):
        with pytest.raises(ModelError, match=message):
            read_architecture(config | change)

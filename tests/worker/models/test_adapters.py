"""LoRA adapters of every kind of projection give the logits that PEFT's own model gives, with its adapters merged and unmerged."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.checkpoints import load_oracle, make_checkpoint, prompt
from tests.cpu_threads import NUM_THREADS
from tests.engine_driver import make_request, run
from tests.matrices import some_daily
from tests.thread_ranks import ThreadRanks
from tests.worker.models.test_dense_families import CASES as DENSE
from tests.worker.models.test_moe_families import CASES as MIXTURES
from tests.worker.models.test_sharded_families import NINE
from transom_core.config import EngineConfig, LoraConfig
from transom_core.errors import RequestError
from transom_core.model_files.resolve import resolve_model
from transom_core.settings.settings import Settings
from transom_core.text.tokenizer import Tokenizer
from transom_kernels.launch import has_cpu_kernels
from transom_worker.engine.engine import Engine
from transom_worker.execution.executor import RankUsage
from transom_worker.execution.setup.weight_plan import plan_weights
from transom_worker.models.layers import adapters as adapters_module
from transom_worker.scheduling.step import NO_ADAPTER, StepPlan
from transom_worker.telemetry.metrics.engine_metrics import EngineMetrics

peft = pytest.importorskip("peft")  # the oracle

TOLERANCE = 1e-4  # of the logits' standard deviation
LENGTHS, NUM_STEPS = (41, 30, 19), 5
SLOTS = (1, NO_ADAPTER, 0)  # of the three sequences
SETTINGS: dict[str, Any] = {
    **{"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "enable_prefix_caching": False, "dtype": "float32"},
    **{"block_size": 8, "max_num_batched_tokens": 45, "kv_cache_memory_bytes": "8MiB", "num_threads": NUM_THREADS},
}
# A family of each way to name, split, reorder, scale and share projections -> what its adapters may change.
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
TARGETS = {
    "llama": (*ATTENTION, *MLP),
    "cohere2": (*ATTENTION, *MLP),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gemma3": (*ATTENTION, *MLP),
    "gemma4": (*ATTENTION, *MLP, "per_layer_model_projection", "per_layer_input_gate", "per_layer_projection"),
    "lfm2": ("q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"),
    "lfm3": (*ATTENTION, "g_proj", "w1", "w3", "w2", "in_proj", "out_proj"),
    "hy_v3": (*ATTENTION, "shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj"),
    "falcon_h1": (*ATTENTION, *MLP, "in_proj"),
    "granite4 with experts": (*ATTENTION, "in_proj", "out_proj", "shared_mlp.input_linear", "shared_mlp.output_linear"),
    "jamba": (*ATTENTION, "in_proj", "x_proj", "out_proj"),
    "nemotron_h with experts": (*ATTENTION, "in_proj"),
    # PEFT takes the names of MLPs for those of the experts.
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "qwen3_next": (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"),
    "qwen3_moe": ATTENTION,
}
DAILY = ("llama", "cohere2", "gemma4", "qwen3_next", "deepseek_v3")
CASES = {"llama": NINE, **{name: (DENSE | MIXTURES)[name] for name in TARGETS if name != "llama"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A checkpoint, and two adapters for it."""

    folder: Path
    adapters: tuple[Path, Path]

    def oracle(self, slot: int) -> PreTrainedModel:
        model = load_oracle(self.folder)
        return model if slot == NO_ADAPTER else peft.PeftModel.from_pretrained(model, self.adapters[slot]).eval()


@torch.no_grad()
def make_adapter(folder: Path, model: PreTrainedModel, seed: int, **settings: Any) -> Path:
    """Write a random adapter that changes what projections give by about a half."""
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.normal_(0.0, weight.shape[1] ** -0.5 * (0.5 if "lora_B" in name else 1.0))
    adapted.save_pretrained(folder)
    return folder


def make_adapted(folder: Path, name: str) -> Adapted:
    case = CASES[name]
    model = make_checkpoint(folder / "model", case.family, **case.config)
    last = TARGETS[name][-1]
    settings: tuple[dict[str, Any], ...] = (
        {"r": 3, "lora_alpha": 4, "target_modules": list(TARGETS[name])},
        {"r": 8, "lora_alpha": 2, "use_rslora": True, "rank_pattern": {last: 5}, "alpha_pattern": {f"1.*{last}": 3}}
        | {"target_modules": [TARGETS[name][0], last]},
    )
    first, second = (
        make_adapter(folder / f"adapter{slot}", load_oracle(model), slot, **one) for slot, one in enumerate(settings)
    )
    return Adapted(folder=model, adapters=(first, second))


@pytest.fixture(scope="module", params=some_daily(CASES, DAILY))
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted(tmp_path_factory.mktemp("adapted"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted(tmp_path_factory.mktemp("llama"), "llama")


class AdaptedRanks(ThreadRanks):
    """Ranks whose sequences have the adapters of `SLOTS`, and whose logits are kept by sequence."""

    def __init__(self, config: EngineConfig, size: int) -> None:
        super().__init__(config, size)
        self._sequences: dict[int, int] = {}  # sequence -> index in `SLOTS`
        self._steps: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        plan.new_sequences = [replace(new, adapter_slot=SLOTS[int(new.request_id)]) for new in plan.new_sequences]
        self._sequences |= {new.seq_id: int(new.request_id) for new in plan.new_sequences}
        if plan.seq_ids:
            self._steps.append(plan)
        super().submit(plan)

    def logits_by_sequence(self) -> torch.Tensor:
        """[3, NUM_STEPS, V], of which each sequence's tokens were chosen."""
        rows: list[list[torch.Tensor]] = [[] for _ in SLOTS]
        for plan, logits in zip(self._steps, self.logits(), strict=True):
            sampling = [seq_id for seq_id, sample in zip(plan.seq_ids, plan.sample, strict=True) if sample]
            for seq_id, row in zip(sampling, logits, strict=True):
                rows[self._sequences[seq_id]].append(row)
        return torch.stack([torch.stack(of_one[:NUM_STEPS]) for of_one in rows])


@contextmanager
def started(adapted: Adapted, size: int = 1, **settings: Any) -> Iterator[tuple[Engine, AdaptedRanks]]:
    """An engine whose steps have parts of prompts, and its ranks with both adapters loaded."""
    config = Settings.parse(model=str(adapted.folder), **(SETTINGS | settings)).engine_config()
    ranks = AdaptedRanks(config, size)
    tokenizer = Tokenizer.load(resolve_model(config.model.model))
    engine = Engine(config, ranks, tokenizer, EngineMetrics(model="adapted", worker="0"))
    for slot, path in enumerate(adapted.adapters):
        ranks.load_adapter(slot, str(path))
    try:
        yield engine, ranks
    finally:
        engine.shutdown()


class Answer(NamedTuple):
    """The tokens of three sequences with different adapters, and the logits [3, NUM_STEPS, V] of which they were chosen."""

    tokens: list[list[int]]
    logits: torch.Tensor
    usage: RankUsage
    weight_bytes: tuple[int, ...]  # of each rank


def answer(adapted: Adapted, size: int = 1, **settings: Any) -> Answer:
    prompts = [prompt(length, salt=length) for length in LENGTHS]
    with started(adapted, size, **settings) as (engine, ranks):
        wholes = run(engine, [make_request(f"{i}", ids, max_tokens=NUM_STEPS) for i, ids in enumerate(prompts)])
        reports, logits = ranks.rank_reports(), ranks.logits_by_sequence()
    tokens = [ids + whole.token_ids for ids, whole in zip(prompts, wholes, strict=True)]
    return Answer(tokens, logits, reports[0].usage, tuple(one.info.memory.weight_bytes for one in reports))


@torch.no_grad()
def test_logits_are_those_of_peft_merged_and_unmerged(adapted: Adapted) -> None:
    """Three sequences in one batch, with an adapter each and with none, whose prompts are cut into chunks."""
    answers = answer(adapted)
    for ids, ours, slot in zip(answers.tokens, answers.logits, SLOTS, strict=True):
        oracle, rows = adapted.oracle(slot), slice(-NUM_STEPS - 1, -1)
        theirs = oracle(torch.tensor([ids])).logits[0, rows]
        bound = TOLERANCE * float(theirs.std())
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=bound)
        if slot != NO_ADAPTER:
            base = adapted.oracle(NO_ADAPTER)(torch.tensor([ids])).logits[0, rows]
            assert float((base - theirs).abs().max()) > 1000 * bound
            oracle.merge_adapter()
            merged = oracle(torch.tensor([ids])).logits[0, rows]
            torch.testing.assert_close(ours, merged, rtol=0.0, atol=bound)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_give_the_logits_of_one_rank_and_hold_what_the_plan_says(llama: Adapted, size: int) -> None:
    """Of 9 heads two ranks have 6 and 3."""
    alone, together = answer(llama), answer(llama, size)
    assert together.tokens == alone.tokens
    torch.testing.assert_close(together.logits, alone.logits, rtol=0.0, atol=1e-4)
    lora = LoraConfig(max_loras=3, max_lora_rank=8)
    planned = plan_weights(str(llama.folder), "cpu", tensor_parallel_size=size, lora=lora).rank_bytes
    assert together.weight_bytes == planned


def test_an_adapter_of_a_multimodal_model_is_its_text_decoders(llama: Adapted, tmp_path: Path) -> None:
    def renamed(own: Path, prefix: str) -> Path:
        folder = copytree(own, tmp_path / prefix)
        weights = folder / "adapter_model.safetensors"
        save_file({re.sub(r"model\.(?=layers)", prefix, name): a for name, a in load_file(weights).items()}, weights)
        return folder

    newer, older = map(renamed, llama.adapters, ("model.language_model.", "language_model.model."))
    assert torch.equal(answer(replace(llama, adapters=(newer, older))).logits, answer(llama).logits)


def test_a_quantised_model_takes_adapters(llama: Adapted) -> None:
    right, ours = answer(llama).logits, answer(llama, quantization="int8").logits
    assert float((ours[:, 0] - right[:, 0]).abs().mean()) < 0.05 * float(right.std())


def test_recorded_decode_steps_give_what_eager_ones_give(llama: Adapted) -> None:
    recorded, eager = answer(llama), answer(llama, enforce_eager=True)
    assert recorded.tokens == eager.tokens
    assert torch.equal(recorded.logits, eager.logits)
    if has_cpu_kernels():
        assert recorded.usage.num_graph_decodes
        assert not recorded.usage.num_eager_decodes


def test_only_steps_with_adapters_launch_anything_for_them(llama: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(llama, enforce_eager=True) as (engine, _):
        launched: list[int] = []
        monkeypatch.setattr(adapters_module, "add_lora_", lambda y, x, slots, weights: launched.append(len(x)))
        run(engine, [make_request(f"{SLOTS.index(NO_ADAPTER)}", prompt(9), max_tokens=2)])
        assert not launched
        run(engine, [make_request("0", prompt(9), max_tokens=1)])
        # In each layer queries, keys and values are one projection, and so are gate and up; the last MLP has the last row alone.
        assert launched == [9] * 14 + [1] * 2


LAYER = "base_model.model.model.layers.0."
WRONG = {
    "no target": ({"base_model.model.lm_head.lora_A.weight": (4, 72)}, "lm_head.*may change .*q_proj"),
    "no matrix": ({f"{LAYER}self_attn.q_proj.lora_magnitude_vector": (144,)}, "lora_magnitude_vector.*no matrix"),
    "one of two": ({f"{LAYER}mlp.up_proj.lora_A.weight": None}, "up_proj.*only one"),
    "rank": ({f"{LAYER}mlp.up_proj.lora_A.weight": (4, 72)}, r"up_proj.*shapes \(4, 72\) and \(96, 3\)"),
    "config": (
        {f"{LAYER}mlp.up_proj.lora_A.weight": (9, 72), f"{LAYER}mlp.up_proj.lora_B.weight": (96, 9)},
        "has 9 rows",
    ),
    "shape": ({f"{LAYER}mlp.up_proj.lora_A.weight": (3, 71)}, r"its weight has \(96, 72\); the adapter belongs"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_adapters_are_refused_by_name(
    llama: Adapted, tmp_path: Path, changes: dict[str, tuple[int, ...] | None], message: str
) -> None:
    copytree(llama.adapters[0], tmp_path / "wrong")
    file = tmp_path / "wrong" / "adapter_model.safetensors"
    tensors = load_file(file)
    for name, shape in changes.items():
        if shape is None:
            del tensors[name]
        else:
            tensors[name] = torch.zeros(shape)
    if "lm_head" in next(iter(changes)):
        tensors["base_model.model.lm_head.lora_B.weight"] = torch.zeros(2048, 4)
    save_file(tensors, file)
    with started(llama) as (_, ranks), pytest.raises(RequestError, match=message) as refused:
        ranks.load_adapter(0, str(file.parent))
    assert refused.value.param == "lora_path"

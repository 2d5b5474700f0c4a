"""Small random checkpoints of any family, made by transformers, and what transformers computes with them.

Weights are random but not arbitrary: sublayers outweigh the embeddings, so that greedy text does not repeat itself; heads look
far back, so that a wrong mask changes the text at once; logits have a set spread, so that margins are clear. They are
representable in bf16.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.mistral4 import Mistral4Config, Mistral4ForCausalLM

from tests import step_model
from tests.expert_choices import ExpertChoices
from tests.tiny_checkpoints import reference_greedy, tiny_tokenizer

VOCAB_SIZE = 512
LOGIT_STD = 4.0
NUM_TOKENS = 32  # each window and chunk of a family ends within some answer
LENGTHS = (1, 5, 40, 202)  # the last one's whole blocks end within a chunk, so that lost chunks must be repaired
MIN_MARGIN = 1e-3
MIN_CHOICE_MARGIN = 2e-5  # rounding moves the scores of these models' experts by up to 1.1e-5 of the largest score
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

# transformers makes it by name only within a multimodal model
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
step_model.register()

# Families that transformers has under another name -> that name.
ANOTHER_NAME = {"kimi_k2": "deepseek_v3"}

# Standard deviation times sqrt(columns): 1 keeps the size of what goes in.
_GAINS = dict(embed_tokens=0.5, embeddings=0.5, lm_head=0.5, q_proj=1.5, k_proj=1.5, o_proj=3.0, down_proj=3.0)
_GAINS |= {"out_proj": 3.0, "w2": 3.0, "output_linear": 3.0}  # LFM2's and Granite 4's
# Norm weights of queries and keys set how sharply heads look.
_LOOKING_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")


def make_checkpoint(folder: Path, family: str, *, seed: int = 0, looking: float = 1.5, **config: Any) -> Path:
    """Write a checkpoint of `family` (config.json's model_type) in the sizes above, overridden by `config`; return the folder."""
    torch.manual_seed(seed)
    settings = AutoConfig.for_model(ANOTHER_NAME.get(family, family), **(SIZES | config))
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation="eager").eval()
    scale_weights(model, looking=looking)
    model.save_pretrained(folder)
    if family in ANOTHER_NAME:
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | {"model_type": family}))
    tiny_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def make_classifier(folder: Path, text_model: Path, *, num_labels: int = 1) -> PreTrainedModel:
    """Write a checkpoint with the layers of `text_model` and a classification head; return transformers' own model of it."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(text_model, num_labels=num_labels, dtype=torch.float32)
    model.score.weight.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def scale_weights(model: PreTrainedModel, *, looking: float = 1.5) -> None:
    """Random weights whose sizes suit a test; what is not a matrix or a norm is drawn like a bias or left to the caller."""
    less_one = _holds_norms_less_one(model)
    for name, weight in model.named_parameters():
        if "norm" in name:
            middle = looking if any(norm in name for norm in _LOOKING_NORMS) else 1.0
            weight.uniform_(0.8 * middle, 1.2 * middle).sub_(1.0 if less_one and "linear_attn" not in name else 0.0)
        elif name.endswith("A_log"):  # states that remember from two to a hundred tokens
            weight.uniform_(-5.0, -0.5)
        elif name.endswith("router.scale"):  # Gemma 4's: it divides by the root of the width
            weight.uniform_(0.8, 1.2).mul_(len(weight) ** 0.5)
        elif weight.dim() == 1:
            weight.normal_(0.0, 0.3)
        else:
            weight.normal_(0.0, next((g for key, g in _GAINS.items() if key in name), 1.0) * weight.shape[-1] ** -0.5)
    if model.config.model_type.startswith("gemma"):  # these multiply what they look up
        model.get_input_embeddings().weight.mul_(model.config.hidden_size**-0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.7, 1.0).copy_(buffer.bfloat16())
    _spread_logits(model, 1.0 if less_one else 0.0)
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())


def _holds_norms_less_one(model: PreTrainedModel) -> bool:
    gemma = ("gemma", "gemma2", "gemma3_text")
    return model.config.model_type in (*gemma, "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "step3p5")


def _spread_logits(model: PreTrainedModel, less: float) -> None:
    """Scale the last norm until logits have LOGIT_STD; soft caps bend, so more than once."""
    ids = torch.randint(3, VOCAB_SIZE, (1, 64))
    names = ("embedding_norm", "norm_f", "final_layernorm", "norm")  # LFM2's, Nemotron-H's, Falcon-H1's, all others'
    weight = next(getattr(model.model, name) for name in names if hasattr(model.model, name)).weight
    for _ in range(4):
        weight.copy_((weight + less) * (LOGIT_STD / model(ids).logits.std()) - less)


def load_oracle(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """transformers' own model of a checkpoint, with `changes` to its config."""
    written = json.loads((folder / "config.json").read_text())
    if known := ANOTHER_NAME.get(written.pop("model_type")):
        # With the family's own name in the config, transformers' class loads but leaves its experts random and only warns.
        config = AutoConfig.for_model(known, **(written | changes))
    else:
        config = AutoConfig.from_pretrained(folder, **changes)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A prompt, its greedy continuation, and the log-probabilities [NUM_TOKENS, vocabulary] that each token was chosen from.

    `choice_margin` is how far the closest choice of an expert was ahead of the next best (`expert_choices`).
    """

    prompt: list[int]
    token_ids: list[int]
    logprobs: torch.Tensor
    choice_margin: float

    @property
    def margin(self) -> float:
        """How far the closest choice was ahead of the next best."""
        best = self.logprobs.topk(2, dim=-1).values
        return float((best[:, 0] - best[:, 1]).min())

    @property
    def is_clear(self) -> bool:
        """Whether no token and no expert was chosen so closely that rounding could choose another one."""
        return self.margin > MIN_MARGIN and self.choice_margin > MIN_CHOICE_MARGIN


def prompt(length: int, salt: int = 0) -> list[int]:
    """A prompt without structure."""
    return [(131 * length + 17 * j + j * j * 29 + 7 * salt) % (VOCAB_SIZE - 10) + 5 for j in range(length)]


@torch.inference_mode()
def greedy(
    model: PreTrainedModel, ids: Sequence[int], num_tokens: int = NUM_TOKENS, *, guess: Sequence[int] = ()
) -> Answer:
    """What `model` continues `ids` with, token by token; then checked against one pass over all of it.

    A `guess` whose every token is the model's own choice after those before it is that continuation: the pass is enough.
    """
    if len(guess) == num_tokens:
        answer = _in_one_pass(model, ids, guess)
        if answer.logprobs.argmax(-1).tolist() == answer.token_ids:
            return answer
    tokens = reference_greedy(model, ids, num_tokens)
    answer = _in_one_pass(model, ids, tokens)
    assert answer.logprobs.argmax(-1).tolist() == tokens, "transformers with a cache differs from transformers without"
    return answer


def _in_one_pass(model: PreTrainedModel, ids: Sequence[int], tokens: Sequence[int]) -> Answer:
    with ExpertChoices() as choices:
        logprobs = step_logprobs(model, ids, tokens)
    return Answer(prompt=list(ids), token_ids=list(tokens), logprobs=logprobs, choice_margin=choices.margin)


@torch.inference_mode()
def step_logprobs(model: PreTrainedModel, ids: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities at each of `tokens` after `ids`, from one pass without a cache."""
    logits = model(torch.tensor([[*ids, *tokens[:-1]]]), use_cache=False).logits[0].float()
    return torch.log_softmax(logits[len(ids) - 1 :], dim=-1)

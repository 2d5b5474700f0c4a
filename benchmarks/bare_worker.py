"""A worker's scheduler and executor without text, whose steps can be looked at, and a model that is next to nothing to compute."""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from transom_core.contract import Request, SamplingParams
from transom_core.settings.settings import Settings
from transom_worker.execution.executor import Executor, ExecutorInfo
from transom_worker.execution.executor_factory import create_executor
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepTimings

TINY = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 2048}
TINY_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step, by the monotonic clock: scheduled from and to, answered at, and what the first rank says of itself."""

    schedule_s: tuple[float, float]
    answered_s: float
    timings: StepTimings

    @property
    def rank_s(self) -> tuple[float, float]:
        """From and to on the first rank."""
        timings = self.timings
        inside_s = timings.prepare_s + timings.copy_s + timings.forward_s + timings.sample_s
        return timings.begin_s, timings.begin_s + inside_s

    @property
    def forward_s(self) -> tuple[float, float]:
        """Its forward pass."""
        begin_s = self.timings.begin_s + self.timings.prepare_s + self.timings.copy_s
        return begin_s, begin_s + self.timings.forward_s


class Worker:
    """Scheduler and executor of a worker, without text."""

    def __init__(self, model: str, *, ranks: int, in_flight: int, batch: int, dtype: str) -> None:
        settings = Settings.parse(
            model=model,
            device="cpu",
            dtype=dtype,
            num_threads=1,
            tensor_parallel_size=ranks,
            steps_in_flight=in_flight,
            max_num_seqs=batch,
            kv_cache_memory_bytes="256MiB",
            max_model_len=1024,
        )
        self._config = settings.engine_config()
        self._batch = batch
        begin_s = time.perf_counter()
        self._executor: Executor = create_executor(self._config)
        self._info: ExecutorInfo = self._executor.start()
        self.start_s = time.perf_counter() - begin_s

    def decode(self, num_steps: int) -> list[StepTimes]:
        """A batch of new sequences, and the times of steps after all of them are under way."""
        scheduler = self._scheduler = Scheduler(
            self._config.scheduler,
            self._info.layout,
            block_size=self._config.cache.block_size,
            max_model_len=self._info.max_model_len,
            enable_prefix_caching=False,
        )
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        for index in range(self._batch):
            prompt = tuple((31 * index + 17 * j) % 2000 + 5 for j in range(PROMPT_TOKENS))
            scheduler.add(Request(request_id=str(index), prompt_token_ids=prompt, params=params, seed=0))
        times = list(self._steps(num_steps + 10))
        for index in range(self._batch):
            scheduler.abort(str(index))
        return times[10:]

    def close(self) -> None:
        """End the ranks."""
        self._executor.shutdown()

    def _steps(self, count: int) -> Iterator[StepTimes]:
        spans: deque[tuple[float, float]] = deque()
        while count:
            while (begin_s := time.perf_counter()) and (plan := self._scheduler.schedule()) is not None:
                spans.append((begin_s, time.perf_counter()))
                self._executor.submit(plan)
            result = self._executor.receive()
            self._scheduler.receive(result)
            count -= 1
            yield StepTimes(schedule_s=spans.popleft(), answered_s=time.perf_counter(), timings=result.timings)
        while spans:
            self._scheduler.receive(self._executor.receive())
            spans.popleft()


@contextmanager
def worker(model: str, **settings: Any) -> Iterator[Worker]:
    """A worker that ends with the block."""
    found = Worker(model, **settings)
    try:
        yield found
    finally:
        found.close()


def step_ms(times: list[StepTimes]) -> float:
    """Milliseconds from answer to answer, the median."""
    ends = [step.answered_s for step in times]
    return 1e3 * statistics.median(late - early for early, late in pairwise(ends))


def write_tiny_model(folder: Path) -> str:
    """A llama without a tokenizer, whose numbers mean nothing."""
    hidden, inner, heads = TINY["hidden_size"], TINY["intermediate_size"], TINY_HEADS
    width, kv_width = (heads[name] * heads["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "self_attn.q_proj": (width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, width),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    tensors = {
        f"model.layers.{layer}.{name}.weight": torch.randn(shape) * 0.05
        for layer in range(TINY["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    tensors |= {
        "model.embed_tokens.weight": torch.randn(TINY["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "llama", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    config |= {"dtype": "float32", **TINY, **TINY_HEADS}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)

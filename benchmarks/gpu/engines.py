"""The engine that `gpu.models` measures, over random weights."""

import itertools
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from transformers import PreTrainedConfig

from benchmarks.engine.steps import Steps
from benchmarks.gpu.geometries import RandomWeights, config_json
from tests.tiny_checkpoints import byte_tokenizer
from transom_core.contract import OutputEvent, SamplingParams
from transom_core.model_config.architecture import read_architecture
from transom_core.model_files.resolve import ModelFiles
from transom_core.settings.settings import Settings
from transom_core.text.tokenizer import Tokenizer
from transom_worker.engine.engine import Engine
from transom_worker.execution.local_executor import LocalExecutor
from transom_worker.execution.setup.model_loading import LoadedModel
from transom_worker.models.registry import build_model
from transom_worker.telemetry.metrics.engine_metrics import EngineMetrics

PROFILED_STEPS = 4
TOP_KERNELS = 8
RUNS = 3  # of a prompt, and of some steps each: the median counts, and how far they are apart is the spread
FIRST_STEPS = 4  # not timed
BATCHED_TOKENS = 8192  # of a step
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random ids, the same in every run and different for every prompt."""
    draw = random.Random(count * 7919 + length)
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]


def _middle(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """The median, and how far apart the runs are."""
    return {name: statistics.median(seconds), "spread": max(seconds) / min(seconds) - 1}


class Transom:
    """The engine as `LLM` runs it, over a model that was handed to it."""

    def __init__(
        self, config: PreTrainedConfig, device: torch.device, *, longest: int, most: int, enforce_eager: bool
    ) -> None:
        """Sequences of up to `longest` tokens, `most` at once; on a GPU the KV pool takes what the default share of it leaves."""
        self._device, self._vocab_size = device, config.vocab_size
        architecture, weights = read_architecture(config_json(config)), RandomWeights(device)
        model = build_model(architecture, weights, dtype=torch.bfloat16, device=device)
        weights.close()
        loaded = LoadedModel(model=model, architecture=architecture, dtype="bfloat16", device=device, eos_token_ids=())
        sizes: dict[str, Any] = {"max_num_batched_tokens": BATCHED_TOKENS}
        if device.type != "cuda":
            sizes = {"max_num_batched_tokens": 64, "kv_cache_memory_bytes": "16MiB"}
        engine_config = Settings.parse(
            model=config.model_type, device=device.type, dtype="bfloat16", max_model_len=longest, max_num_seqs=most,
            enforce_eager=enforce_eager, **sizes,
        ).engine_config()  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            byte_tokenizer().save_pretrained(folder)
            files = ModelFiles(name="random", path=Path(folder), is_gguf=False, config={}, generation_config={})
            tokenizer = Tokenizer.load(files)
        metrics = EngineMetrics(model=config.model_type, worker="0")
        self._executor = LocalExecutor(engine_config, loaded)
        self._engine = Engine(engine_config, self._executor, tokenizer, metrics)
        self._steps = Steps(self._engine)
        self.architecture, self.weight_bytes = architecture, model.weight_bytes
        self.kv_pool_bytes = self._engine.info.memory.kv_bytes
        self._about = {"kv_pool_bytes": self.kv_pool_bytes, "num_graphs": self._engine.info.num_graphs}

    def prefill(self, num_tokens: int) -> dict[str, Any]:
        """`seconds` to the first token of one prompt, their `spread` over some runs, and that `first_token`."""
        [prompt] = prompts(1, num_tokens, self._vocab_size)
        seconds, events = self._first_tokens([prompt] * (1 + RUNS), salt=None)  # the first warms up
        [first] = [token for event in events for token in event.token_ids]
        return _middle("seconds", seconds[1:]) | {"first_token": first} | self._about

    def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """`step_s`, its `spread`, and `tokens_per_s` of `batch` sequences, each `context` tokens long, over runs of `steps` steps;
        and what the device's kernels take of a step."""
        self._start(batch, context)
        self._steps.tokens(FIRST_STEPS)
        num_replayed, moments = self._num_replayed(), [time.perf_counter()]
        for _ in range(RUNS):
            if self._steps.tokens(steps) != batch * steps:
                raise RuntimeError(f"{steps} steps did not bring a token for each of {batch} sequences every time.")
            # A step's result has come; what is in flight then belongs to the next run.
            moments.append(time.perf_counter())
        num_replayed = self._num_replayed() - num_replayed
        kernels = self._profiled()
        self._steps.stop()
        found = _middle("step_s", [(end - begin) / steps for begin, end in itertools.pairwise(moments)])
        found["tokens_per_s"] = batch / found["step_s"]
        return {**found, "steps": RUNS * steps, "steps_replayed": num_replayed, **kernels, **self._about}

    def close(self) -> None:
        """Give its memory back."""
        self._engine.shutdown()

    def prefix_hit(self, cached: int, more: int) -> dict[str, Any]:
        """`seconds` to the first token of prompts whose first `cached` tokens are in the prefix cache, and `more` are new."""
        [prefix] = prompts(1, cached, self._vocab_size)
        # The first prompt is the prefix, the second warms up.
        tails = [[], *prompts(1 + RUNS, more, self._vocab_size)]
        seconds, events = self._first_tokens([prefix + tail for tail in tails], salt="prefix")
        [hits] = [event.usage.num_cached_tokens for event in events if event.usage is not None]
        return _middle("seconds", seconds[2:]) | {"cached": hits, "more": more} | self._about

    def _first_tokens(self, given: Sequence[list[int]], *, salt: str | None) -> tuple[list[float], list[OutputEvent]]:
        """The seconds from each prompt to its first token, one prompt after the other, and the events of the last."""
        seconds, events = [], []
        for prompt in given:
            begin_s = time.perf_counter()
            self._steps.add(prompt, ONE_TOKEN, salt=salt)
            events = self._steps.to_the_end()
            seconds.append(time.perf_counter() - begin_s)
        return seconds, events

    def mixed(self, batch: int, steps: int, length: int) -> dict[str, Any]:
        """`step_s` of `steps` steps in which `batch` sequences decode, and prompts of `length` tokens are computed beside them, one
        after the other; `tokens` of both kinds."""
        names = self._start(batch, length)
        fresh, tokens, begin_s = iter(prompts(2 * steps, length, self._vocab_size)), 0, time.perf_counter()
        for _ in range(steps):
            if self._engine.scheduler.num_waiting == 0:
                self._steps.add(next(fresh), ONE_TOKEN)
            tokens += sum(1 if event.request_id in names else length for event in self._steps.step())
        spent_s = time.perf_counter() - begin_s
        self._steps.stop()
        speed = {"step_s": spent_s / steps, "tokens_per_s": tokens / spent_s}
        return {"batch": batch, "tokens": tokens, **speed, **self._about}

    def _start(self, batch: int, length: int) -> set[str]:
        names = {self._steps.add(prompt) for prompt in prompts(batch, length, self._vocab_size)}
        self._steps.until_started()
        return names

    def _num_replayed(self) -> int:
        """Steps so far that were CUDA graphs."""
        return sum(report.usage.num_graph_steps for report in self._executor.rank_reports())

    def _profiled(self) -> dict[str, Any]:
        """Seconds of kernels in a step, all and the longest, and how many launches, where the profiler runs."""
        kinds, is_cuda = torch.profiler.ProfilerActivity, self._device.type == "cuda"
        kind = DeviceType.CUDA if is_cuda else DeviceType.CPU  # calls on the host carry their kernels' times once more
        try:
            with torch.profiler.profile(activities=[kinds.CUDA if is_cuda else kinds.CPU], acc_events=True) as trace:
                self._steps.tokens(PROFILED_STEPS)
                if is_cuda:
                    torch.cuda.synchronize()
            entries = [entry for entry in trace.key_averages() if entry.device_type == kind]
        except RuntimeError as error:
            return {"profiler_error": str(error)[:300]}
        spent_s: Counter[str] = Counter()
        launches = 0
        for entry in entries:
            micros = entry.self_device_time_total if is_cuda else entry.self_cpu_time_total
            if micros > 0:
                spent_s[entry.key] += micros / 1e6 / PROFILED_STEPS
                launches += entry.count
        return {
            "kernels_s": sum(spent_s.values()),
            "launches": launches / PROFILED_STEPS,
            "longest_kernels_s": dict(spent_s.most_common(TOP_KERNELS)),
        }

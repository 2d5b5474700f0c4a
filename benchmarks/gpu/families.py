"""Small random checkpoints of every family: the engine on a GPU, float32, against the engine on the CPU, token by token.

    python -m benchmarks.gpu.families [--only WORDS] [--device cuda] [--budget-s 420] [--at-once 6]

Prompts run together in small chunks, then again from the cache, then again with lost windows; then without a cache twice, whose
bits must be the same, and each alone. Tokens must be equal; a divergence is excused where the CPU's best two log-probabilities are
closer than 1e-4. Writes families.json.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu.device import describe
from benchmarks.gpu.jobs import ABOUT, Part, Result, main
from tests import checkpoints
from tests.engine_driver import Whole, make_engine, make_request, run
from tests.lost_windows import lose_windows
from tests.worker.models import test_moe_families
from tests.worker.models.deepseek_v4_checkpoint import make_deepseek_v4

CASES = test_moe_families.ALL_CASES
NEAR_TIE = 1e-4
TOLERANCE = 1e-3  # of log-probabilities
SITUATIONS = ("cold", "hit", "repaired")
TOGETHER, AGAIN, SINGLE = "together", "again", "alone"  # without a cache
V4 = "deepseek_v4"


def jobs(options: argparse.Namespace) -> list[str]:
    """The tests' checkpoints."""
    return [*CASES, *test_moe_families.QUANTISED, V4]


def answer(options: argparse.Namespace, job: str, about: Result) -> Result:
    """One family."""
    if job == ABOUT:
        return {"status": "passed", **describe(torch.device(options.device))}
    transformers.logging.set_verbosity_error()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # whichever this machine prefers
    num_threads = max(1, (os.cpu_count() or 1) // options.at_once)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        checkpoint = make_deepseek_v4(path) if job == V4 else test_moe_families.make_folder(path, job, CASES)
        written = Written(checkpoint, num_threads, is_tiny=options.tiny)
        cpu = written.with_cache("cpu")
        other = written.with_cache(options.device) | written.without_cache(options.device)
    wanted = cpu | {TOGETHER: cpu["cold"], SINGLE: cpu["cold"]}
    parts = {name: compare(wanted[name], other[name]) for name in wanted}
    wrong = [f"{name}: {part.wrong[0]}" for name, part in parts.items() if part.wrong]
    worst = max(part.worst for part in parts.values())
    same_bits = bits(other[TOGETHER]) == bits(other[AGAIN])
    wrong += [f"log-probabilities differ by {worst:.2g}"] if worst > TOLERANCE else []
    wrong += [] if same_bits else ["two runs differ"]
    return {
        "status": "wrong" if wrong else "passed",
        "error": "; ".join(wrong),
        "tokens": sum(part.tokens for part in parts.values()),
        "excused": sum(part.excused for part in parts.values()),
        "worst_logprob_difference": worst,
        "same_bits_twice": same_bits,
    }


@dataclass(frozen=True, slots=True)
class Written:
    """What engines over a checkpoint write, by situation: an answer to each prompt."""

    checkpoint: Path
    num_threads: int
    is_tiny: bool

    def with_cache(self, device: str) -> dict[str, list[Whole]]:
        """The prompts at first, from the prefix cache, and with lost windows."""
        engine, found = self._engine(device), {}
        for situation in SITUATIONS:
            if situation == "repaired":
                lose_windows(engine.scheduler.cache)
            found[situation] = run(engine, self._requests(situation))
        engine.shutdown()
        return found

    def without_cache(self, device: str) -> dict[str, list[Whole]]:
        """Where nothing is kept of earlier prompts: all together, once more, and each alone."""
        engine = self._engine(device, enable_prefix_caching=False)
        found = {name: run(engine, self._requests(name)) for name in (TOGETHER, AGAIN)}
        found[SINGLE] = [run(engine, [request])[0] for request in self._requests(SINGLE)]
        engine.shutdown()
        return found

    def _engine(self, device: str, **settings: Any) -> Any:
        return make_engine(
            str(self.checkpoint), device=device, dtype="float32", block_size=8, max_model_len=768,
            max_num_batched_tokens=45, max_num_seqs=8, num_threads=self.num_threads, **settings,
        )  # fmt: skip

    def _requests(self, name: str) -> list[Any]:
        lengths, count = ((5, 40), 6) if self.is_tiny else (checkpoints.LENGTHS, checkpoints.NUM_TOKENS)
        prompts = {f"{name}{length}": checkpoints.prompt(length) for length in lengths}
        return [make_request(request, prompt, max_tokens=count, logprobs=5) for request, prompt in prompts.items()]


def bits(answers: list[Whole]) -> list[list[tuple[int, float]]]:
    """Tokens and their log-probabilities, to be compared exactly."""
    return [[(step.chosen.token_id, step.chosen.logprob) for step in answer.logprobs] for answer in answers]


@dataclass(slots=True)
class Compared:
    """Tokens up to the first divergence of each answer, excused ones, wrong ones, and the worst log-probability."""

    tokens: int = 0
    excused: int = 0
    wrong: list[str] = field(default_factory=list)
    worst: float = 0.0


def compare(cpu: list[Whole], other: list[Whole]) -> Compared:
    """Answer by answer."""
    result = Compared()
    for at, (mine, theirs) in enumerate(zip(cpu, other, strict=True)):
        for step, (wanted, got) in enumerate(zip(mine.token_ids, theirs.token_ids, strict=True)):
            best = mine.logprobs[step].top
            if wanted != got:
                margin = best[0].logprob - best[1].logprob
                if margin < NEAR_TIE:
                    result.excused += 1
                else:
                    result.wrong.append(f"answer {at}, token {step}: {got} instead of {wanted}, {margin:.2g} ahead")
                break
            result.tokens += 1
            difference = abs(mine.logprobs[step].chosen.logprob - theirs.logprobs[step].chosen.logprob)
            result.worst = max(result.worst, difference if difference == difference else float("inf"))
    return result


PART = Part(
    name="families", module="benchmarks.gpu.families", jobs=jobs, answer=answer,
    job_s=150.0, budget_s=420.0,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(PART, __doc__))

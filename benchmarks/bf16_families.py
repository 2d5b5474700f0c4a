"""What bfloat16 costs each family: differences of log-probabilities from float32, Transom's beside transformers' own.

    PYTHONPATH=. python benchmarks/bf16_families.py [--only gemma]

Small random checkpoints, those of the tests. Greedy text of transformers in float32 is given to both in bfloat16, and each token's
log-probability is compared. Largest values come from routers and indexers that choose otherwise, and mean nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from tests.checkpoints import Answer, greedy, load_oracle, make_checkpoint, prompt, step_logprobs
from tests.worker.models import test_dense_families, test_moe_families
from tests.worker.models.deepseek_v4_checkpoint import make_deepseek_v4

from transom_worker import LLM, SamplingParams

LENGTHS = (40, 200, 700)
NUM_PROMPTS = 4  # of each length
CASES = test_dense_families.CASES | test_moe_families.CASES


def ours(folder: Path, answers: list[Answer]) -> torch.Tensor:
    """The log-probability of each answer's tokens, one after the other."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(folder), dtype="bfloat16", max_model_len=1024, enable_prefix_caching=False) as llm:
        prompts = [{"prompt_token_ids": [*answer.prompt, *answer.token_ids]} for answer in answers]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return torch.tensor(
        [
            step[token_id].logprob
            for answer, output in zip(answers, outputs, strict=True)
            for token_id, step in zip(answer.token_ids, output.prompt_logprobs[len(answer.prompt) :], strict=True)
        ]
    )


def chosen(logprobs: torch.Tensor, answer: Answer) -> torch.Tensor:
    """The log-probability of each of an answer's tokens."""
    return logprobs.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]


def summary(differences: torch.Tensor) -> str:
    """Mean and quantiles."""
    median, high = differences.quantile(torch.tensor([0.5, 0.99])).tolist()
    return f"{differences.mean():.3f} | {median:.3f} | {high:.2f}"


def report(name: str, folder: Path) -> str:
    """One row of the table."""
    exact = load_oracle(folder)
    answers = [greedy(exact, prompt(length, salt)) for length in LENGTHS for salt in range(NUM_PROMPTS)]
    wanted = torch.cat([chosen(answer.logprobs, answer) for answer in answers])
    rounded = load_oracle(folder, torch.bfloat16)
    theirs = torch.cat([chosen(step_logprobs(rounded, a.prompt, a.token_ids), a) for a in answers])
    return f"| {name} | {summary((ours(folder, answers) - wanted).abs())} | {summary((theirs - wanted).abs())} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a case's name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| checkpoint | Transom mean | median | 99 % | transformers mean | median | 99 % |\n|---|---|---|---|---|---|---|"
    )
    for name in (*CASES, "deepseek_v4"):
        if options.only in name:
            with tempfile.TemporaryDirectory() as folder:
                if name == "deepseek_v4":
                    make_deepseek_v4(Path(folder))
                else:
                    make_checkpoint(Path(folder), CASES[name].family, **CASES[name].config)
                print(report(name, Path(folder)), flush=True)


if __name__ == "__main__":
    main()

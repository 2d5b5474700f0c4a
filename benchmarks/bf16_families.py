"""What bfloat16 costs each family: differences of log-probabilities from float32, Transom's beside transformers' own.

    PYTHONPATH=tests:tests/models python benchmarks/bf16_families.py [--only gemma]

Small random checkpoints, those of the tests. Greedy text of transformers in float32 is given to both in bfloat16; at each of its
tokens the 20 most likely ones are compared. Largest values come from routers and indexers that choose otherwise, and mean nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import test_dense_families
import test_moe_families
import torch
from deepseek_v4_checkpoint import make_deepseek_v4

from checkpoints import Answer, greedy, load_oracle, make_checkpoint, prompt, step_logprobs
from transom_worker import LLM, SamplingParams

LENGTHS = (40, 200, 700)
ALTERNATIVES = 20
CASES = test_dense_families.CASES | test_moe_families.CASES


def ours(folder: Path, answers: list[Answer]) -> list[torch.Tensor]:
    """Log-probabilities [steps, vocabulary] of each answer, NaN where Transom does not report them."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=ALTERNATIVES, logprobs=ALTERNATIVES)
    with LLM(str(folder), dtype="bfloat16", max_model_len=1024, enable_prefix_caching=False) as llm:
        prompts = [{"prompt_token_ids": [*answer.prompt, *answer.token_ids[:-1]]} for answer in answers]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    tables = []
    for answer, output in zip(answers, outputs, strict=True):
        steps = [*output.prompt_logprobs[len(answer.prompt) :], output.outputs[0].logprobs[0]]
        table = torch.full_like(answer.logprobs, float("nan"))
        for row, step in zip(table, steps, strict=True):
            for token_id, logprob in step.items():
                row[token_id] = logprob.logprob
        tables.append(table)
    return tables


def summary(differences: torch.Tensor) -> str:
    """Mean and quantiles."""
    median, high = differences.quantile(torch.tensor([0.5, 0.99])).tolist()
    return f"{differences.mean():.3f} | {median:.3f} | {high:.2f}"


def report(name: str, folder: Path) -> str:
    """One row of the table."""
    exact = load_oracle(folder)
    answers = [greedy(exact, prompt(length)) for length in LENGTHS]
    theirs_model = load_oracle(folder, torch.bfloat16)
    theirs = [step_logprobs(theirs_model, answer.prompt, answer.token_ids) for answer in answers]
    wanted = torch.cat([answer.logprobs for answer in answers])
    mine, other = torch.cat(ours(folder, answers)), torch.cat(theirs)
    likely = ~mine.isnan()
    return f"| {name} | {summary((mine - wanted)[likely].abs())} | {summary((other - wanted)[likely].abs())} |"


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

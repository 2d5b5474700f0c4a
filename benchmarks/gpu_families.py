"""Small random checkpoints of every family: the engine on a GPU, float32, against the engine on the CPU, token by token.

    PYTHONPATH=kernels:worker python benchmarks/gpu_families.py [--only WORDS] [--device cuda] [--budget-s 420]

Prompts run together in small chunks, then again from the cache, then again with lost windows. Tokens must be equal; a divergence is
excused where the CPU's best two log-probabilities are closer than 1e-4. Writes families.json and families.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_jobs import run_jobs, serve
from gpu_results import is_sound, markdown, tally, write

if TYPE_CHECKING:
    from engine_driver import Whole

TESTS = Path(__file__).parents[1] / "tests"
sys.path.extend(
    str(folder) for folder in (TESTS, TESTS / "models") if str(folder) not in sys.path
)  # whose checkpoints these are

FAMILY_S = 90.0
LOCAL = Path(__file__).parent / "results" / "local"
ABOUT = "about"  # the first job
NEAR_TIE = 1e-4
TOLERANCE = 1e-3  # of log-probabilities
SITUATIONS = ("cold", "hit", "repaired")
V4 = "deepseek_v4"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, write and print."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse(given)
    if options.child:
        serve(functools.partial(answer, options))
        return 0
    words = options.only.split()
    jobs = [ABOUT, *(name for name in family_names() if all(word in name for word in words))]
    found = []
    command = [sys.executable, __file__, *given, "--child"]
    for result in run_jobs(command, jobs, budget_s=options.budget_s, job_s=FAMILY_S):
        found.append(result)
        print(json.dumps({name: result.get(name) for name in ("job", "status", "error", "job_s")}), flush=True)
    about = found[0].get("about", {}) | {"compared_device": options.device}
    path = write(options.out, "families", about=about, results=found[1:], table=_table(found[1:]))
    print(f"{tally(found[1:])}; {path}")
    return 0 if is_sound(found) else 1


def _parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="families whose name holds all of these words")
    parser.add_argument("--tiny", action="store_true", help="two short prompts")
    parser.add_argument("--budget-s", type=float, default=420.0)
    parser.add_argument("--out", type=Path, default=LOCAL)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def family_names() -> list[str]:
    """The tests' checkpoints."""
    from test_dense_families import CASES
    from test_moe_families import CASES as MIXTURES
    from test_moe_families import QUANTISED

    return [*CASES, *MIXTURES, *QUANTISED, V4]


def answer(options: argparse.Namespace, job: str) -> dict[str, Any]:
    """One family."""
    import torch

    from gpu_device import describe

    if job == ABOUT:
        return {"status": "passed", "about": describe(torch.device(options.device))}
    import transformers

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make(job, Path(folder))
        cpu, other = (written(checkpoint, device, tiny=options.tiny) for device in ("cpu", options.device))
    parts = {name: compare(cpu[name], other[name]) for name in SITUATIONS}
    excused = sum(part.excused for part in parts.values())
    wrong = {name: part.wrong for name, part in parts.items() if part.wrong}
    worst = max(part.worst for part in parts.values())
    result = {
        "tokens": sum(part.tokens for part in parts.values()),
        "excused": excused,
        "worst_logprob_difference": worst,
        "situations": list(parts),
    }
    if wrong:
        return result | {"status": "wrong", "error": "; ".join(f"{name}: {said[0]}" for name, said in wrong.items())}
    if worst > TOLERANCE:
        return result | {"status": "wrong", "error": f"log-probabilities differ by {worst:.2g}"}
    return result | {"status": "passed"}


def make(name: str, folder: Path) -> Path:
    """A checkpoint of the tests; the folder that holds it."""
    import deepseek_v4_checkpoint
    import test_moe_families
    from test_dense_families import CASES

    import checkpoints

    if name == V4:
        return deepseek_v4_checkpoint.make_deepseek_v4(folder)
    case = (CASES | test_moe_families.CASES)[name.split(" in ")[0]]
    if name not in test_moe_families.QUANTISED:
        checkpoints.make_checkpoint(folder, case.family, **case.config)
        test_moe_families.draw_corrections(folder)
        return folder
    checkpoints.make_checkpoint(folder / "plain", case.family, **case.config)
    test_moe_families.QUANTISED[name](folder / "plain", folder / "packed")
    return folder / "packed"


def written(checkpoint: Path, device: str, *, tiny: bool) -> dict[str, list[Whole]]:
    """What an engine on a device writes, in each situation."""
    from checkpoints import LENGTHS, NUM_TOKENS, prompt
    from engine_driver import make_engine, make_request, run
    from lost_windows import lose_windows

    lengths, count = ((5, 40), 6) if tiny else (LENGTHS, NUM_TOKENS)
    engine = make_engine(
        str(checkpoint), device=device, dtype="float32", block_size=8, max_model_len=768, max_num_batched_tokens=45,
        max_num_seqs=8, num_threads=None,
    )  # fmt: skip
    found = {}
    for situation in SITUATIONS:
        if situation == "repaired":
            lose_windows(engine._scheduler.cache)
        requests = [
            make_request(f"{situation}{length}", prompt(length), max_tokens=count, logprobs=5) for length in lengths
        ]
        found[situation] = run(engine, requests)
    engine.shutdown()
    return found


@dataclass(slots=True, kw_only=True)
class Compared:
    """Tokens up to the first divergence of each answer, excused ones, wrong ones, and the worst log-probability."""

    tokens: int
    excused: int
    wrong: list[str]
    worst: float


def compare(cpu: list[Whole], other: list[Whole]) -> Compared:
    """Answer by answer."""
    result = Compared(tokens=0, excused=0, wrong=[], worst=0.0)
    for at, (mine, theirs) in enumerate(zip(cpu, other, strict=True)):
        for step, (wanted, got) in enumerate(zip(mine.token_ids, theirs.token_ids, strict=True)):
            best = mine.logprobs[step].top
            if wanted != got:
                margin = best[0].logprob - best[1].logprob
                if margin < NEAR_TIE:
                    result.excused += 1
                else:
                    result.wrong.append(f"answer {at}, token {step}: {got} in place of {wanted}, {margin:.2g} ahead")
                break
            result.tokens += 1
            difference = abs(mine.logprobs[step].chosen.logprob - theirs.logprobs[step].chosen.logprob)
            result.worst = max(result.worst, difference if difference == difference else float("inf"))
    return result


def _table(results: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            result["job"], result["status"], result.get("tokens"), result.get("excused"),
            result.get("worst_logprob_difference"), result.get("job_s"), str(result.get("error", ""))[:160],
        ]
        for result in results
    ]  # fmt: skip
    columns = ("family", "status", "equal tokens", "near ties", "worst log-probability", "s", "error")
    return f"{tally(results)}.\n\n" + markdown(columns, rows)


if __name__ == "__main__":
    sys.exit(main())

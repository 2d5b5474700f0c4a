"""Small random checkpoints of every family: the engine on a GPU, float32, against the engine on the CPU, token by token.

    PYTHONPATH=kernels:worker python benchmarks/gpu_families.py [--only WORDS] [--device cuda] [--budget-s 420] [--at-once 6]

Prompts run together in small chunks, then again from the cache, then again with lost windows; then without a cache twice, whose
bits must be the same, and each alone. Tokens must be equal; a divergence is excused where the CPU's best two log-probabilities are
closer than 1e-4. Writes families.json and families.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_jobs import Script, arguments_of, run_script
from gpu_results import Report, markdown, tally
from gpu_targets import family_targets

if TYPE_CHECKING:
    from tests.engine_driver import Whole

sys.path.append(str(Path(__file__).parents[1]))  # for the package `tests`, which makes the checkpoints

ABOUT = "about"  # the first job
NEAR_TIE = 1e-4
TOLERANCE = 1e-3  # of log-probabilities
SITUATIONS = ("cold", "hit", "repaired")
TOGETHER, AGAIN, SINGLE_RANK = "together", "again", "alone"  # without a cache
V4 = "deepseek_v4"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, write and print."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    script = Script(
        name="families", path=__file__, first=ABOUT, jobs=lambda options: family_names(), answer=answer, line=_line,
        report=_report, job_s=150.0, budget_s=420.0,
    )  # fmt: skip
    return run_script(script, arguments_of(script, __doc__).parse_args(given), given)


def family_names() -> list[str]:
    """The tests' checkpoints."""
    from tests.worker.models.test_dense_families import CASES
    from tests.worker.models.test_moe_families import CASES as MIXTURES
    from tests.worker.models.test_moe_families import QUANTISED

    return [*CASES, *MIXTURES, *QUANTISED, V4]


def answer(options: argparse.Namespace, job: str) -> dict[str, Any]:
    """One family."""
    import torch

    from gpu_device import describe

    if job == ABOUT:
        return {"status": "passed", "about": describe(torch.device(options.device))}
    import transformers

    transformers.logging.set_verbosity_error()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # whatever this machine prefers
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make(job, Path(folder))
        threads = max(1, (os.cpu_count() or 1) // options.at_once)
        how = {"tiny": options.tiny, "num_threads": threads}
        cpu, other = (written(checkpoint, device, **how) for device in ("cpu", options.device))
        other |= written_without_cache(checkpoint, options.device, **how)
    wanted = cpu | {TOGETHER: cpu["cold"], SINGLE_RANK: cpu["cold"]}
    parts = {name: compare(wanted[name], other[name]) for name in wanted}
    wrong = {name: part.wrong for name, part in parts.items() if part.wrong}
    worst = max(part.worst for part in parts.values())
    result = {
        "tokens": sum(part.tokens for part in parts.values()),
        "excused": sum(part.excused for part in parts.values()),
        "worst_logprob_difference": worst,
        "same_bits_twice": bits(other[TOGETHER]) == bits(other[AGAIN]),
        "alone_wrong": len(parts[SINGLE_RANK].wrong),
        "situations": list(parts),
    }
    if wrong:
        return result | {"status": "wrong", "error": "; ".join(f"{name}: {said[0]}" for name, said in wrong.items())}
    if worst > TOLERANCE:
        return result | {"status": "wrong", "error": f"log-probabilities differ by {worst:.2g}"}
    if not result["same_bits_twice"]:
        return result | {"status": "wrong", "error": "two runs differ"}
    return result | {"status": "passed"}


def make(name: str, folder: Path) -> Path:
    """A checkpoint of the tests; the folder that holds it."""
    from tests import checkpoints
    from tests.worker.models import deepseek_v4_checkpoint, test_moe_families
    from tests.worker.models.test_dense_families import CASES

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


def written(checkpoint: Path, device: str, *, tiny: bool, num_threads: int) -> dict[str, list[Whole]]:
    """What an engine on a device writes, in each situation."""
    from tests.engine_driver import run
    from tests.lost_windows import lose_windows

    engine, found = _engine(checkpoint, device, num_threads=num_threads), {}
    for situation in SITUATIONS:
        if situation == "repaired":
            lose_windows(engine.scheduler.cache)
        found[situation] = run(engine, _requests(situation, tiny=tiny))
    engine.shutdown()
    return found


def written_without_cache(checkpoint: Path, device: str, *, tiny: bool, num_threads: int) -> dict[str, list[Whole]]:
    """What it writes where nothing is kept of earlier prompts: all together, once more, and each alone."""
    from tests.engine_driver import run

    engine = _engine(checkpoint, device, num_threads=num_threads, enable_prefix_caching=False)
    found = {name: run(engine, _requests(name, tiny=tiny)) for name in (TOGETHER, AGAIN)}
    found[SINGLE_RANK] = [run(engine, [request])[0] for request in _requests(SINGLE_RANK, tiny=tiny)]
    engine.shutdown()
    return found


def _engine(checkpoint: Path, device: str, **settings: object) -> Any:
    from tests.engine_driver import make_engine

    return make_engine(
        str(checkpoint), device=device, dtype="float32", block_size=8, max_model_len=768, max_num_batched_tokens=45,
        max_num_seqs=8, **settings,
    )  # fmt: skip


def _requests(name: str, *, tiny: bool) -> list[Any]:
    from tests.checkpoints import LENGTHS, NUM_TOKENS, prompt
    from tests.engine_driver import make_request

    lengths, count = ((5, 40), 6) if tiny else (LENGTHS, NUM_TOKENS)
    return [make_request(f"{name}{length}", prompt(length), max_tokens=count, logprobs=5) for length in lengths]


def bits(answers: list[Whole]) -> list[list[tuple[int, float]]]:
    """Tokens and their log-probabilities, to be compared exactly."""
    return [[(step.chosen.token_id, step.chosen.logprob) for step in answer.logprobs] for answer in answers]


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


def _line(result: dict[str, Any]) -> str:
    return (
        f"{result['status']:8} {result['job']:36} {result.get('job_s', 0):6.1f} s  {str(result.get('error', ''))[:160]}"
    )


def _report(options: argparse.Namespace, first: dict[str, Any], results: list[dict[str, Any]]) -> Report:
    return Report(results=results, table=_table(results, options.device), targets=family_targets(results))


def _table(results: Sequence[dict[str, Any]], device: str) -> str:
    rows = [
        [
            result["job"], result["status"], result.get("tokens"), result.get("excused"), result.get("same_bits_twice"),
            result.get("worst_logprob_difference"), result.get("job_s"), str(result.get("error", ""))[:160],
        ]
        for result in results
    ]  # fmt: skip
    columns = ("family", "status", "equal tokens", "near ties", "same bits", "worst log-probability", "s", "error")
    return f"{tally(results)}, on {device} beside the CPU.\n\n" + markdown(columns, rows)


if __name__ == "__main__":
    sys.exit(main())

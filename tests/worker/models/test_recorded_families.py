"""Decode steps are recorded and replayed: by every family, and in bfloat16 as kernels alone.

`FamilyTests.test_its_decode_steps_are_recorded_and_replayed` fails by a family's name if that family's steps run eagerly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint, prompt
from tests.engine_driver import make_engine, make_request, run
from tests.matrices import some_daily
from tests.worker.models.test_dense_families import CASES as DENSE
from tests.worker.models.test_moe_families import CASES as MIXTURES
from transom_kernels.cpu.program import Program, record_program
from transom_kernels.launch import has_cpu_kernels
from transom_worker.models.registry import FAMILIES

CASES = DENSE | MIXTURES

pytestmark = pytest.mark.skipif(not has_cpu_kernels(), reason="this processor has no kernels")


@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize("name", some_daily(CASES, daily=["gemma4", "cohere2", "llama4"]))
def test_no_torch_operator_in_a_recorded_step(tmp_path: Path, name: str, dtype: str) -> None:
    make_checkpoint(tmp_path, CASES[name].family, **CASES[name].config)
    programs = programs_of(tmp_path, dtype=dtype, max_model_len=64)
    assert len(programs) == 1
    assert programs[0].num_instructions > 0
    assert programs[0].num_calls == 0


def test_every_family_is_asked_whether_it_records() -> None:
    """DeepSeek V4 does not record."""
    assert {case.family for case in CASES.values()} == set(FAMILIES) - {"deepseek_v4"}


def programs_of(folder: Path, **settings: Any) -> list[Program]:
    """The programs that an engine records for one request."""
    made: list[Program] = []

    def recording(*args: Any) -> Any:
        program, logits = record_program(*args)
        made.append(program)
        return program, logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transom_worker.execution.replay.decode_programs.record_program", recording)
        engine = make_engine(str(folder), **settings)
        run(engine, [make_request("one", prompt(3), max_tokens=4)])
        engine.shutdown()
    return made

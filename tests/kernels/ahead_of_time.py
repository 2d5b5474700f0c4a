"""Compiles every kernel in every configuration for GPUs that need not be installed; prints one JSON line per configuration.

A process of its own: triton decides when a kernel is defined whether it is interpreted, and these must not be.

    python -m tests.kernels.ahead_of_time [sm_90|sm_80] [--one-each] [words of names to choose]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.compiled_cases import Compilation, all_cases

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
MATRIX_KINDS = ("HGMMA", "QGMMA", "HMMA")


def compile_for(case: Compilation, arch: int, *, disassembles: bool) -> dict[str, Any]:
    """Registers of a thread, bytes of its stack (spills), shared bytes of a program; disassembled, its kind of matrix instructions.

    Disassembling takes longer than compiling most kernels.
    """
    begin_s = time.perf_counter()
    signature = {name: case.types.get(name, "constexpr") for name in case.kernel.arg_names}
    attributes = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(case.kernel.arg_names)
        if signature[name] not in ("constexpr", "fp32") and name not in case.unaligned
    }
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=case.constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=case.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = object_dump("--dump-resource-usage", file.name)
        sass = object_dump("--dump-sass", file.name) if disassembles else None
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return {
        "name": case.name,
        "arch": arch,
        "registers": int(found[1]),
        "spilled_bytes": int(found[2]),
        "shared_bytes": made.metadata.shared,
        **({} if sass is None else {"matrix": next((kind for kind in MATRIX_KINDS if kind in sass), "none")}),
        "seconds": round(time.perf_counter() - begin_s, 1),
    }


def object_dump(flag: str, path: str) -> str:
    return subprocess.run([TOOLS / "cuobjdump", flag, path], capture_output=True, text=True, check=True).stdout


def main(words: list[str]) -> None:
    archs = [int(word.removeprefix("sm_")) for word in words if word.startswith("sm_")] or [90]
    chosen = [word for word in words if not word.startswith(("sm_", "--"))]
    one_each = "--one-each" in words
    for arch in archs:
        cases = all_cases(arch)
        for case in {case.kernel: case for case in cases}.values() if one_each else cases:
            if all(word in case.name for word in chosen):
                print(json.dumps(compile_for(case, arch, disassembles=not one_each)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Compiles every kernel in every configuration for GPUs that need not be installed; prints one JSON line per configuration.

A process of its own: triton decides when a kernel is defined whether it is interpreted, and these must not be.

    python -m tests.kernels.ahead_of_time [sm_90 sm_80 ...] [--one-each] [--loops] [words of names to choose]

--one-each: one configuration of each kernel; --loops: opcodes of loops.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.compiled_cases import SHARED_BYTES, Compilation, all_cases

OBJECT_DUMP = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
MATRIX_INSTRUCTIONS = ("tcgen05.mma", "wgmma", "mma.sync")
BUFFERS = r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x\d+x"
TENSOR_MEMORY_COLUMNS = 512  # of a multiprocessor of sm_100


def compile_for(case: Compilation, arch: int, has_loops: bool) -> dict[str, Any]:
    """Registers of a thread, bytes of its stack (spills), shared bytes of a program, whether it fits; matrix instructions; of
    loops: opcodes, scores of a thread, what copies are waited for, and buffers of copies."""
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
        usage = dumped(file.name, "--dump-resource-usage")
        loop = product_loop(dumped(file.name, "--dump-sass")) if has_loops else {}
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return {
        "name": case.name,
        "arch": arch,
        "registers": int(found[1]),
        "spilled_bytes": int(found[2]),
        "shared_bytes": made.metadata.shared,
        "fits": made.metadata.shared <= SHARED_BYTES[arch] and (made.metadata.tmem_size or 0) <= TENSOR_MEMORY_COLUMNS,
        "matrix": next((kind for kind in MATRIX_INSTRUCTIONS if kind in made.asm["ptx"]), "none"),
        "scores": case.constants.get("BLOCK_M", 0) * case.constants.get("BLOCK_N", 0) / (32 * made.metadata.num_warps),
        "waits": [int(number) for number in re.findall(r"async_wait[^{]*\{num = (\d+)", made.asm["ttgir"])],
        "seconds": round(time.perf_counter() - begin_s, 1),
        "types": case.types,
        "constants": case.constants | case.options,
        "loop": loop,
        "buffers": [int(count) for count in re.findall(BUFFERS, made.asm["ttgir"])],
    }


def dumped(path: str, what: str) -> str:
    return subprocess.run([OBJECT_DUMP, what, path], capture_output=True, text=True, check=True).stdout


def product_loop(code: str) -> dict[str, int]:
    """How often each opcode is in the shortest loop that multiplies matrices, by the branches that go back; or nothing."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/ +(?:@\S+ +)?(\w+)(.*?);", code)
    lines = [(int(address, 16), opcode, operands) for address, opcode, operands in found]
    jumps = [(int(to.split()[-1], 16), at) for at, opcode, to in lines if opcode == "BRA" and "0x" in to]
    loops = (Counter(opcode for at, opcode, _ in lines if begin <= at <= end) for begin, end in jumps)
    return min(
        (loop for loop in loops if any("MMA" in opcode for opcode in loop)), key=Counter.total, default=Counter()
    )


def main(words: list[str]) -> None:
    archs = [int(word.removeprefix("sm_")) for word in words if word.startswith("sm_")] or [90]
    chosen = [word for word in words if not word.startswith(("sm_", "--"))]
    for arch in archs:
        cases = all_cases(arch)
        if "--one-each" in words:
            cases = list({case.kernel: case for case in cases}.values())
        for case in cases:
            if all(word in case.name for word in chosen):
                print(json.dumps(compile_for(case, arch, "--loops" in words)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

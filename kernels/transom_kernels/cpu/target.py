"""The processor that CPU kernels are compiled for: its LLVM name, and the instruction sets by which kernels choose their code.

The environment variable `TRANSOM_CPU` names another processor to compile for, by its LLVM name, such as `haswell` (AVX2) or
`cascadelake` (AVX-512 with VNNI). Code for it runs here if this processor has all of its instructions.
"""

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm

CPU_VARIABLE = "TRANSOM_CPU"

# the system call arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), on x86-64
_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTarget:
    """A processor in LLVM's terms. `features` lists instruction sets as `+name,-name`; if empty, LLVM takes those of `name`."""

    triple: str
    name: str
    features: str
    x86: bool
    avx512: bool  # 512-bit registers, 32 of them
    bf16: bool  # products of bfloat16 pairs (AVX512-BF16)
    vnni: bool  # products of four 8-bit integers over 512 bits (AVX512-VNNI)
    amx: bool  # tile products of bfloat16 (AMX-BF16), which the operating system allows
    avx2: bool = False
    avx_vnni: bool = False  # products of four 8-bit integers over 256 bits (AVX-VNNI), without AVX-512


# LLVM's name of a processor that TRANSOM_CPU may name -> the instruction sets that it has, of those that kernels ask for
_KNOWN = {
    "haswell": {"avx2"},
    "alderlake": {"avx2", "avxvnni"},
    "znver2": {"avx2"},
    "znver4": {"avx2", "avx512f", "avx512bf16", "avx512vnni"},
    "skylake-avx512": {"avx2", "avx512f"},
    "cascadelake": {"avx2", "avx512f", "avx512vnni"},
    "cooperlake": {"avx2", "avx512f", "avx512vnni", "avx512bf16"},
    "sapphirerapids": {"avx2", "avx512f", "avx512vnni", "avx512bf16", "amx-bf16"},
    "x86-64": set(),
}


@cache
def cpu_target() -> CpuTarget:
    """Return the processor to compile for: this one, or the one that `TRANSOM_CPU` names.

    Raises:
        ValueError: `TRANSOM_CPU` names an unknown processor.
    """
    name = os.environ.get(CPU_VARIABLE, "")
    if name:
        if name not in _KNOWN:
            raise ValueError(f"{CPU_VARIABLE} is {name!r}; give one of {', '.join(sorted(_KNOWN))}, or unset it.")
        return named_target(name)
    features = dict(llvm.get_host_cpu_features())
    given = {feature for feature, has in features.items() if has}
    flags = ",".join(("+" if has else "-") + feature for feature, has in sorted(features.items()))
    return _target(llvm.get_process_triple(), llvm.get_host_cpu_name(), flags, given)


def named_target(name: str) -> CpuTarget:
    """Return a processor of `_KNOWN`, on this operating system."""
    return _target(llvm.get_process_triple(), name, "", _KNOWN[name])


def _target(triple: str, name: str, flags: str, given: set[str]) -> CpuTarget:
    x86 = platform.machine() in ("x86_64", "AMD64")
    return CpuTarget(
        triple=triple,
        name=name,
        features=flags,
        x86=x86,
        avx2="avx2" in given,
        avx_vnni=x86 and {"avx2", "avxvnni"} <= given,
        avx512=x86 and "avx512f" in given,
        bf16=x86 and "avx512bf16" in given,
        vnni=x86 and {"avx512f", "avx512vnni"} <= given,
        amx=x86 and "amx-bf16" in given and _tiles_allowed(),
    )


@cache
def _tiles_allowed() -> bool:
    """Ask Linux for permission to use AMX's tile registers, once per process; threads that start later inherit it."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)

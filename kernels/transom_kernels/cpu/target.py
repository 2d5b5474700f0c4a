"""The processor that CPU kernels are compiled for: its LLVM name, and the instruction sets by which kernels choose their code.

The environment variable `TRANSOM_CPU` names another processor to compile for, by its LLVM name, such as `haswell` (AVX2),
`cascadelake` (AVX-512 with VNNI) or `neoverse-v1` (ARM with bfloat16). Code for it runs here if this processor has all of its
instructions; code for the other architecture can only be compiled.
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
# where Linux says that an ARM processor multiplies bfloat16; LLVM does not ask there
_AT_HWCAP2, _HWCAP2_BF16 = 26, 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTarget:
    """A processor in LLVM's terms. `features` lists instruction sets as `+name,-name`; if empty, LLVM takes those of `name`."""

    triple: str  # begins with the architecture, as `platform.machine` names it on Linux
    name: str
    features: str
    x86: bool
    avx512: bool  # 512-bit registers, 32 of them
    bf16: bool  # products of bfloat16 pairs (AVX512-BF16, or ARM's bfdot)
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
_KNOWN_ARM = {"neoverse-n1": set[str](), "neoverse-v1": {"bf16"}}


@cache
def cpu_target() -> CpuTarget:
    """Return the processor to compile for: this one, or the one that `TRANSOM_CPU` names.

    Raises:
        ValueError: `TRANSOM_CPU` names an unknown processor.
    """
    name = os.environ.get(CPU_VARIABLE, "")
    if name:
        if name not in _KNOWN | _KNOWN_ARM:
            known = ", ".join(sorted(_KNOWN | _KNOWN_ARM))
            raise ValueError(f"{CPU_VARIABLE} is {name!r}; give one of {known}, or unset it.")
        return named_target(name)
    features = dict(llvm.get_host_cpu_features())
    if platform.system() == "Linux" and platform.machine() == "aarch64":
        features["bf16"] = bool(ctypes.CDLL(None).getauxval(_AT_HWCAP2) & _HWCAP2_BF16)
    given = {feature for feature, has in features.items() if has}
    flags = ",".join(("+" if has else "-") + feature for feature, has in sorted(features.items()))
    return _target(llvm.get_process_triple(), llvm.get_host_cpu_name(), flags, given)


def named_target(name: str) -> CpuTarget:
    """Return a processor of `_KNOWN` or `_KNOWN_ARM`."""
    if name in _KNOWN_ARM:
        return _target("aarch64-unknown-linux-gnu", name, "", _KNOWN_ARM[name])
    return _target("x86_64-unknown-linux-gnu", name, "", _KNOWN[name])


def _target(triple: str, name: str, flags: str, given: set[str]) -> CpuTarget:
    x86 = triple.startswith("x86_64")
    return CpuTarget(
        triple=triple,
        name=name,
        features=flags,
        x86=x86,
        avx2="avx2" in given,
        avx_vnni=x86 and {"avx2", "avxvnni"} <= given,
        avx512=x86 and "avx512f" in given,
        bf16=("avx512bf16" if x86 else "bf16") in given,
        vnni=x86 and {"avx512f", "avx512vnni"} <= given,
        amx=x86 and "amx-bf16" in given and _tiles_allowed(),
    )


@cache
def _tiles_allowed() -> bool:
    """Ask Linux for permission to use AMX's tile registers, once per process; threads that start later inherit it."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)

"""Run the numeric tests as other processors and other numbers of threads would.

Each setting below makes torch, oneDNN, MKL or numpy's OpenBLAS take the code that it has for another processor. All read their
variables once, when they are loaded: so each setting has a pytest process of its own. A setting that this processor cannot run
is skipped.

    make test-processors                                      # all settings
    make test-processors ARGS="--only OPENBLAS"               # the settings with these letters in their name
    make test-processors ARGS="-- tests/kernels -k route"     # arguments for pytest, instead of the numeric tests' folders

One line a setting says what passed; the exit status is 1 if a test failed. The whole output is in build/test_processors/.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "test_processors"
FOLDERS = (
    "tests/kernels",
    "tests/worker/models/layers",
    "tests/worker/models",
    "tests/worker/sampling",
    "tests/end_to_end",
)
AVX2 = ("avx2", "fma")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable, its value, and the processor flags that the code it chooses is made of."""

    variable: str
    value: str
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the report calls the setting."""
        return f"{self.variable}={self.value}" if self.variable else "no setting"

    @property
    def environment(self) -> dict[str, str]:
        """What the setting adds to the environment."""
        return {self.variable: self.value} if self.variable else {}


SETTINGS = (
    Setting("", ""),
    Setting("ONEDNN_MAX_CPU_ISA", "AVX2", AVX2),
    Setting("ONEDNN_MAX_CPU_ISA", "AVX512_CORE", AVX512),
    Setting("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", (*AVX512, "avx512_bf16")),
    Setting("ATEN_CPU_CAPABILITY", "default"),
    Setting("ATEN_CPU_CAPABILITY", "avx2", AVX2),
    Setting("OPENBLAS_CORETYPE", "Haswell", AVX2),
    Setting("OPENBLAS_CORETYPE", "SkylakeX", AVX512),
    Setting("MKL_ENABLE_INSTRUCTIONS", "AVX2", AVX2),
    Setting("TRANSOM_TEST_THREADS", "1"),
    Setting("TRANSOM_TEST_THREADS", "2"),
    Setting("TRANSOM_TEST_THREADS", "4"),
)


def processor() -> tuple[str, frozenset[str]]:
    """This processor's name and flags; none where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    return fields.get("model name", platform.machine()), frozenset(fields.get("flags", "").split())


def daily_numeric_tests() -> str:
    """The marker expression of `make test`, less the tests that start Ray Serve: those look at texts, not at numbers."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    words = shlex.split(options["addopts"])
    return f"{words[words.index('-m') + 1]} and not serve"


def lacking(setting: Setting, flags: frozenset[str]) -> str:
    """Why this processor cannot run the setting; empty if it can, or if its flags are unknown."""
    if setting.flags and platform.machine().lower() not in ("x86_64", "amd64"):
        return "the setting is for x86"
    missing = [flag for flag in setting.flags if flags and flag not in flags]
    return f"the processor has no {', '.join(missing)}" if missing else ""


def run(setting: Setting, arguments: list[str]) -> tuple[bool, str]:
    """Whether the tests passed, and what pytest's last line says."""
    others = {other.variable for other in SETTINGS}
    environment = {name: value for name, value in os.environ.items() if name not in others}
    environment |= {"OMP_WAIT_POLICY": "PASSIVE", **setting.environment}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *arguments]
    log = LOGS / f"{setting.name.replace(' ', '_')}.log"
    with log.open("w") as output:
        result = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    lines = [line.strip("= ") for line in log.read_text().splitlines() if line.strip()] or ["no output"]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return result.returncode == 0, "\n    ".join([lines[-1], *failures])


def main() -> int:
    """Runs the chosen settings; 1 if a test failed."""
    parser = argparse.ArgumentParser(description="Run the numeric tests as other processors would.")
    parser.add_argument("--only", default="", help="the setting of this name, or all whose name contains it")
    parser.add_argument("--processes", default="auto", help="of pytest side by side, 4 at most; 0: one after the other")
    parser.add_argument("pytest_arguments", nargs="*", help="instead of the numeric tests' folders")
    options = parser.parse_args()
    alike = [setting for setting in SETTINGS if options.only.lower() in setting.name.lower()]
    chosen = [setting for setting in alike if setting.name == options.only] or alike
    if not chosen:
        parser.error(f"--only {options.only}: no setting has that; there are {', '.join(s.name for s in SETTINGS)}")
    name, flags = processor()
    print(f"Processor: {name}, {os.cpu_count()} CPUs", flush=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    arguments = ["-m", daily_numeric_tests(), "-n", options.processes, "--maxprocesses", "4"]
    arguments += ["--dist", "loadfile", "--no-loadscope-reorder", *(options.pytest_arguments or FOLDERS)]
    failed = []
    for setting in chosen:
        if reason := lacking(setting, flags):
            print(f"skipped  {setting.name}: {reason}", flush=True)
            continue
        begin = time.monotonic()
        passed, says = run(setting, arguments)
        if not passed:
            failed.append(setting.name)
        print(
            f"{'passed' if passed else 'FAILED'}  {setting.name}: {says} ({time.monotonic() - begin:.0f} s)", flush=True
        )
    if failed:
        print(f"\nFailed: {', '.join(failed)}. Outputs: {LOGS.relative_to(ROOT)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

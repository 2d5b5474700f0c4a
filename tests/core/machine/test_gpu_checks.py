"""What keeps a GPU idle is named in one line, with what to do."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fake_gpus import H100, L4, T4, TORCH, driver_of, several
from transom_core.machine.gpu_checks import TorchBuild, gpu_problem, too_few_gpus, torch_build
from transom_core.machine.gpus import NO_DRIVER, GpuDriver

DRIVER = driver_of(H100, L4)


def test_the_installed_torch_is_read_from_its_files() -> None:
    torch = pytest.importorskip("torch")
    build = torch_build()
    assert build.version == torch.__version__
    assert torch.version.cuda == (None if build.cuda is None else ".".join(map(str, build.cuda)))


@pytest.mark.parametrize(
    ("driver", "torch", "variables", "message"),
    [
        (DRIVER, TORCH, {}, None),
        (driver_of(H100, cuda=(13, 2)), TORCH, {}, None),
        (NO_DRIVER, TORCH, {}, "has no NVIDIA driver"),
        (driver_of(), TORCH, {}, "580.65 finds no GPU"),
        (replace(NO_DRIVER, error="Unknown Error"), TORCH, {}, r"driver does not answer \(Unknown Error\).*restart"),
        (DRIVER, TORCH, {"CUDA_VISIBLE_DEVICES": "-1"}, "'-1', which leaves none of this machine's 2 GPUs"),
        (DRIVER, TORCH, {"CUDA_VISIBLE_DEVICES": "0,0"}, "'0,0', which leaves none .* indices or UUIDs, each once"),
        (
            driver_of(H100, replace(L4, error="GPU is lost")),
            TORCH,
            {},
            "L4 cannot be used: GPU is lost. .*leave it out",
        ),
        (driver_of(H100, replace(L4, error="GPU is lost")), TORCH, {"CUDA_VISIBLE_DEVICES": "0"}, None),
        (DRIVER, TorchBuild(version="2.13.0+cpu", cuda=None), {}, "torch 2.13.0[+]cpu is a build for CPUs"),
        (
            driver_of(H100, cuda=(12, 8)),
            TORCH,
            {},
            "580.65 runs CUDA up to 12.8, and torch 2.13.0 is built for CUDA 13.0",
        ),
        (driver_of(H100, T4), TORCH, {}, "Tesla T4 has compute capability 7.5; .* need 8.0"),
        (driver_of(H100, T4), TORCH, {"CUDA_VISIBLE_DEVICES": "0"}, None),
        (DRIVER, TORCH, {"PATH": ""}, "no gcc or clang on PATH.*apt-get install gcc libc6-dev"),
        (DRIVER, TORCH, {"CC": "no-such-compiler"}, "no no-such-compiler on PATH"),
    ],
)
def test_what_keeps_a_gpu_idle_is_named(
    tmp_path: Path, driver: GpuDriver, torch: TorchBuild, variables: dict[str, str], message: str | None
) -> None:
    (tmp_path / "Python.h").touch()
    compiler = tmp_path / "gcc"
    compiler.touch(mode=0o755)
    problem = gpu_problem(driver, torch, {"PATH": str(tmp_path)} | variables, python_include=str(tmp_path))
    assert (problem is None) == (message is None)
    assert message is None or re.search(message, problem or "")


def test_pythons_headers_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "clang").touch(mode=0o755)
    problem = gpu_problem(DRIVER, TORCH, {"PATH": str(tmp_path)}, python_include=str(tmp_path))
    assert problem is not None
    assert "has no Python.h. Install them (Debian and Ubuntu: apt-get install python3-dev)" in problem


@pytest.mark.parametrize(
    ("driver", "visible", "message"),
    [
        (driver_of(*several(4)), None, None),
        (driver_of(*several(8)), "GPU-7,GPU-1,GPU-2,GPU-3", None),
        (
            driver_of(*several(2)),
            None,
            "four ranks needs 4 GPUs and this machine has 2; ask for fewer, or use --device cpu.",
        ),
        (driver_of(*several(8)), "0,1,9,2", "CUDA_VISIBLE_DEVICES '0,1,9,2' leaves 2 of this machine's 8"),
        (driver_of(*several(8)), "", "CUDA_VISIBLE_DEVICES '' leaves 0 of this machine's 8"),
        (driver_of(*several(8)), "1,2,3,1", "CUDA_VISIBLE_DEVICES '1,2,3,1' leaves 0 of this machine's 8"),
        (NO_DRIVER, "", "this machine has 0"),
    ],
)
def test_too_few_gpus(driver: GpuDriver, visible: str | None, message: str | None) -> None:
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    problem = too_few_gpus(4, driver, "four ranks", variables)
    assert (problem is None) == (message is None)
    assert (message or "") in (problem or "")

"""The pool and the compiler of CPU kernels, tested with the kernel of `rms_norm`."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from tests.cpu_threads import kernel_threads
from transom_kernels.cpu import kernel_sources
from transom_kernels.cpu.kernel import cache_key, cpu_kernel, object_code, statistics
from transom_kernels.cpu.kernel_sources import used_modules
from transom_kernels.cpu.launching import launch
from transom_kernels.cpu.pool import Pool, pool

NORM = ("transom_kernels.rms_norm.cpu_kernel", "make_rms_norm")


def norm(x, weight, eps=1e-5):
    out = torch.full_like(x, float("nan"))
    kernel = cpu_kernel(*NORM, dtype="f32", weight_dtype="f32")
    rows, width = x.shape
    launch(kernel, rows, [x, None, None, weight, out, out, rows, 1, width, x.stride(0) * 4, 0, 1.0, eps])
    return out


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_the_result_does_not_depend_on_the_number_of_threads(num_threads):
    x, weight = torch.randn(100, 77), torch.randn(77)
    expected = norm(x, weight)
    with kernel_threads(num_threads):
        for _ in range(200):
            assert torch.equal(norm(x, weight), expected)


def test_threads_that_launch_at_the_same_time_do_not_disturb_each_other():
    weight = torch.randn(50)
    inputs = [torch.randn(rows, 50) for rows in (1, 3, 20, 64)]
    expected = [norm(x, weight) for x in inputs]
    wrong = []

    def work(x, want):
        wrong.extend(1 for _ in range(300) if not torch.equal(norm(x, weight), want))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_pool_ends_its_threads():
    before = threading.active_count()
    own = Pool(3)
    assert threading.active_count() == before + 2
    own.close()
    assert threading.active_count() == before


def test_a_forked_child_has_a_pool_of_its_own():
    x, weight = torch.randn(4, 20), torch.randn(20)
    expected = norm(x, weight)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(norm(x, weight), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_code_in_the_cache_is_loaded_without_numba(tmp_path):
    program = (
        "import sys, time\n"
        "from transom_kernels.cpu.kernel import cpu_kernel, statistics\n"
        f"assert cpu_kernel('{NORM[0]}', '{NORM[1]}', dtype='f32', weight_dtype='f32').address\n"
        "from transom_kernels.cpu.pool import Pool\n"
        "Pool(2)\n"
        "time.sleep(0.2)\n"  # the second thread parks, which calls the C library
        "print(statistics.num_compiled, 'numba' in sys.modules)\n"
    )
    environment = {**os.environ, "TRANSOM_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.split() for run in runs] == [["3", "True"], ["0", "False"]]


def test_code_in_the_cache_runs_in_a_process_without_numba(tmp_path):
    program = (
        "import sys, time, torch\n"
        "from transom_kernels.cpu.threads import set_num_threads\n"
        "from transom_kernels.rms_norm import rms_norm\n"
        "set_num_threads(2)\n"
        "x = torch.randn(40, 200)\n"
        "for _ in range(2):\n"
        "    y = rms_norm(x, torch.ones(200), 1e-5)[0]\n"
        "    time.sleep(0.05)\n"  # the other thread parks
        "torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (200,), None, 1e-5))\n"
        "print('numba' in sys.modules)\n"
    )
    environment = {**os.environ, "TRANSOM_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.strip() for run in runs] == ["True", "False"]


def test_a_kernels_key_depends_on_the_files_that_it_uses_alone(tmp_path, monkeypatch):
    folder = tmp_path / "some_kernels"
    for package in (folder, folder / "norm", folder / "other"):
        package.mkdir()
        (package / "__init__.py").touch()
    imports = "from some_kernels.norm import (\n    layout,\n)\nfrom transom_kernels.cpu.simd import splat\n"
    (folder / "norm" / "cpu.py").write_text(imports + "from transom_kernels.cpu.launching import launch\n")
    (folder / "norm" / "layout.py").write_text("def make():\n    from some_kernels.shared import STEP\n")
    (folder / "shared.py").write_text("STEP = 1\n")
    (folder / "other" / "cpu.py").write_text("STEP = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    kernel = cpu_kernel("some_kernels.norm.cpu", "make_norm")

    def key():
        kernel_sources._read.cache_clear()  # as in a new process
        return cache_key(kernel)

    before = key()
    assert {"transom_kernels.cpu.simd", "some_kernels.shared"} < used_modules(kernel.module)
    assert "transom_kernels.cpu.launching" not in used_modules(kernel.module)
    (folder / "other" / "cpu.py").write_text("STEP = 2\n")
    assert key() == before
    (folder / "shared.py").write_text("STEP = 2\n")
    assert key() != before
    assert cache_key(cpu_kernel("some_kernels.norm.cpu", "make_norm", dtype="f32")) != key()


def test_damaged_code_in_the_cache_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TRANSOM_CACHE_DIR", str(tmp_path))
    kernel = cpu_kernel(*NORM, dtype="f32", weight_dtype="bf16")
    assert kernel.address
    (path,) = (tmp_path / "kernels").iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    vars(kernel).pop("address")
    before = statistics.num_compiled
    assert kernel.address
    assert statistics.num_compiled == before + 1


def test_a_checked_kernel_raises_where_it_touches_other_memory():
    program = (
        "import torch\n"
        "from transom_kernels.cpu.kernel import cpu_kernel\n"
        "from transom_kernels.cpu.launching import launch\n"
        f"kernel = cpu_kernel('{NORM[0]}', '{NORM[1]}', dtype='f32', weight_dtype='f32')\n"
        "x, weight = torch.randn(3, 20), torch.randn(20)\n"
        "out = torch.empty(3, 20)\n"
        "launch(kernel, 3, [x, None, None, weight, out, out, 3, 1, 20, 80, 0, 1.0, 1e-5])\n"
        "try:\n"
        "    launch(kernel, 4, [x, None, None, weight, out, out, 4, 1, 20, 80, 0, 1.0, 1e-5])\n"
        "except IndexError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "TRANSOM_CHECKED_KERNELS": "1"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "accesses outside of its memory" in run.stdout


def test_without_kernels_torch_computes_and_the_log_says_why():
    program = (
        "import logging, torch\n"
        "logging.basicConfig()\n"
        "from transom_kernels.launch import kernels_on\n"
        "from transom_kernels.rms_norm import rms_norm\n"
        "x, weight = torch.randn(3, 20), torch.randn(20)\n"
        "torch.testing.assert_close(rms_norm(x, weight, 1e-5)[0], torch.nn.functional.rms_norm(x, (20,), weight, 1e-5))\n"
        "print(kernels_on(x.device))\n"
    )
    environment = {**os.environ, "TRANSOM_CPU": "pdp11"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["torch"]
    assert run.stderr.count("CPU kernels cannot be used") == 1
    assert "TRANSOM_CPU is 'pdp11'" in run.stderr


def test_processes_that_start_together_compile_once(tmp_path):
    program = (
        "from transom_kernels.cpu.kernel import cpu_kernel, statistics\n"
        "assert cpu_kernel('tests.kernels.double_kernel', 'make_double').address\n"
        "print(statistics.num_compiled)\n"
    )
    environment = {**os.environ, "TRANSOM_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert sorted(run.communicate()[0].strip() for run in runs) == ["0", "0", "1"]
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".o"]


def test_a_kernel_that_raises_is_refused():
    with pytest.raises(ValueError, match="calls NRT_Allocate"):
        object_code(cpu_kernel("tests.kernels.double_kernel", "make_division"))


def test_too_many_arguments_are_refused():
    with pytest.raises(ValueError, match="arguments"):
        pool().run_one(cpu_kernel(*NORM, dtype="f32", weight_dtype="f32"), 1, list(range(100)), [], 0)

"""The pool and the compiler of CPU kernels, the cache of their code, and recorded programs, with `rms_norm` and small kernels."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from tests.cpu_threads import kernel_threads
from transom_kernels.cpu import kernel_sources
from transom_kernels.cpu.kernel import CpuKernel, cache_key, cpu_kernel, object_code, statistics
from transom_kernels.cpu.kernel_sources import used_modules
from transom_kernels.cpu.launching import launch
from transom_kernels.cpu.pool import pool
from transom_kernels.cpu.program import ReplayMemory, record_program
from transom_kernels.cpu.recording import NotRecordable, current_recorder, host_call, refuse_recording
from transom_kernels.cpu.target import cpu_target
from transom_kernels.launch import has_cpu_kernels, kernels_on
from transom_kernels.rms_norm import rms_norm


def norm(x, weight):
    return rms_norm(x, weight, 1e-5)[0]


def test_threads_that_launch_at_the_same_time_do_not_disturb_each_other():
    weight = torch.randn(50)
    inputs = [torch.randn(rows, 50) for rows in (1, 30, 200, 640)]
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


def test_a_forked_child_has_a_pool_of_its_own():
    x, weight = torch.randn(4, 20), torch.randn(20)
    expected = norm(x, weight)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(norm(x, weight), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_with_code_in_the_cache_needs_neither_numba_nor_torchs_compiler():
    """Their imports take seconds, which the first answer of a server would wait for."""
    with kernel_threads(2):
        rms_norm(torch.randn(40, 200), torch.ones(200), 1e-5)  # now its code, and that of the threads, is in the cache
    program = (
        "import sys, time, torch\n"
        "from transom_kernels.cpu.kernel import statistics\n"
        "from transom_kernels.cpu.program import ReplayMemory, record_program\n"
        "from transom_kernels.cpu.threads import set_num_threads\n"
        "from transom_kernels.rms_norm import rms_norm\n"
        "set_num_threads(2)\n"
        "x = torch.randn(40, 200)\n"
        "for _ in range(2):\n"
        "    y = rms_norm(x, torch.ones(200), 1e-5)[0]\n"
        "    time.sleep(0.05)\n"  # the other thread parks, which calls the C library
        "torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (200,), None, 1e-5))\n"
        "record_program(lambda: torch.ones(3) + 1, ReplayMemory())\n"
        "print(statistics.num_compiled, 'numba' in sys.modules, 'torch._dynamo' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["0", "False", "False"]


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
    kernel = CpuKernel("tests.kernels.double_kernel", "make_double", ())
    assert kernel.address
    (path,) = (tmp_path / "kernels").iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    vars(kernel).pop("address")
    before = statistics.num_compiled
    assert kernel.address
    assert statistics.num_compiled == before + 1


def test_without_kernels_torch_computes_and_the_log_says_why(monkeypatch, caplog):
    def no_pool():
        raise OSError("CPU kernels run on Linux, not on Plan 9")

    monkeypatch.setattr("transom_kernels.cpu.pool.pool", no_pool)
    has_cpu_kernels.cache_clear()
    try:
        x, weight = torch.randn(3, 20), torch.randn(20)
        for _ in range(2):
            got = rms_norm(x, weight, 1e-5)[0]
        torch.testing.assert_close(got, torch.nn.functional.rms_norm(x, (20,), weight, 1e-5))
        assert kernels_on(x.device) == "torch"
    finally:
        has_cpu_kernels.cache_clear()
    (record,) = caplog.records
    assert all(words in record.message for words in ("CPU kernels cannot be used", "not on Plan 9"))


def test_an_unknown_processor_is_refused(monkeypatch):
    monkeypatch.setenv("TRANSOM_CPU", "pdp11")
    with pytest.raises(ValueError, match="TRANSOM_CPU is 'pdp11'; give one of"):
        cpu_target.__wrapped__()


def test_processes_that_start_together_compile_once(tmp_path):
    program = (
        "from transom_kernels.cpu.kernel import cpu_kernel, statistics\n"
        "assert cpu_kernel('tests.kernels.double_kernel', 'make_double').address\n"
        "print(statistics.num_compiled)\n"
    )
    environment = {**os.environ, "TRANSOM_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert sorted(run.communicate()[0].strip() for run in runs) == ["0", "1"]
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".o"]


def test_a_kernel_that_raises_is_refused():
    with pytest.raises(ValueError, match=r"(?s)must neither raise.*double_kernel\.py"):
        object_code(cpu_kernel("tests.kernels.double_kernel", "make_division"))


def test_too_many_arguments_are_refused():
    with pytest.raises(ValueError, match="arguments"):
        pool().run_one(cpu_kernel("tests.kernels.double_kernel", "make_double"), 1, list(range(100)), [], 0)


@pytest.fixture
def memory():
    """Of recorded programs: a replay does what the function does, over what the inputs hold now."""
    with torch.inference_mode():
        yield ReplayMemory()


def triple(x):
    x.mul_(3.0)


def test_a_replay_reads_the_inputs_anew(memory):
    x, weight, rows = torch.randn(4, 50), torch.randn(50), torch.tensor([3, 1])

    def function():
        y = norm(norm(x, weight), weight) * 2  # torch's product is a call between kernels
        y = norm(y, weight)
        y.add_(1.0)
        host_call(lambda: triple(y))
        return norm(y[rows].view(2, 50), weight)

    program, result = record_program(function, memory)
    assert (program.num_instructions, program.num_calls) == (4, 4)
    for shift in range(3):
        x.normal_()
        rows.copy_(torch.tensor([shift, 3 - shift]))
        expected = function()
        result.fill_(float("nan"))
        program.replay()
        assert torch.equal(result, expected)


def test_results_that_were_dropped_share_memory(memory):
    x, weight = torch.randn(1000, 1000), torch.randn(1000)

    def function():
        y = x
        for _ in range(20):
            y = norm(y, weight)
        return y

    record_program(function, memory)
    assert sum(map(len, memory.chunks)) <= 3 * x.nbytes + (1 << 24)


def test_two_programs_share_the_memory_of_results(memory):
    x, weight = torch.randn(3, 40), torch.randn(40)
    programs = [record_program(lambda: norm(norm(x, weight), weight), memory) for _ in range(5)]
    assert len(memory.chunks) == 1
    expected = norm(norm(x, weight), weight)
    for program, result in programs:
        program.replay()
        assert torch.equal(result, expected)


@pytest.mark.parametrize(
    "read", [lambda x: int(x.sum()), lambda x: x.nonzero(), lambda x: refuse_recording("an operator can refuse, too")]
)
def test_a_function_that_reads_values_cannot_be_recorded(memory, read):
    read(torch.ones(3))
    with pytest.raises(NotRecordable):
        record_program(lambda: read(torch.ones(3)), memory)
    assert current_recorder() is None


def test_the_number_of_items_may_be_read_at_replay(memory):
    x, count, out = torch.randn(96), torch.tensor([2]), torch.zeros(96)
    kernel = cpu_kernel("tests.kernels.double_kernel", "make_double")
    program, _ = record_program(lambda: launch(kernel, count, [x, out, 96]), memory)
    assert out.equal(torch.cat([2 * x[:32], torch.zeros(64)]))
    count.fill_(5)
    program.replay()
    assert out.equal(torch.cat([2 * x[:80], torch.zeros(16)]))

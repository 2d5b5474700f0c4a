"""A part of the GPU's benchmarks whose jobs do to their process what wrong kernels do."""

import argparse
import os
import sys
import threading

from benchmarks.gpu.jobs import ABOUT, Part, Result, arguments_of, run_part


def answer(options: argparse.Namespace, job: str, about: Result) -> Result:
    print("what a library says")
    match job:
        case "spoil":
            return {"status": "passed", "pid": os.getpid(), "fatal": True}
        case "exit":
            sys.stderr.write("about to end\n")
            os._exit(3)
        case "hang":
            threading.Event().wait()
        case "fail":
            raise ValueError("such a number")
        case "break":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if job == ABOUT:
        return {"status": "passed", "speed": 0.5}
    promised = {"promises": {"as fast as others": ["rival", 0.9]}, "reached": {"rival": about["speed"]}}
    return {"status": "passed", "pid": os.getpid()} | promised


PART = Part(
    name="stub", module=__name__, jobs=lambda options: ["one", "two"], answer=answer,
 job_s=60.0, budget_s=600.0,
)  # fmt: skip

if __name__ == "__main__":
    run_part(PART, arguments_of(PART, None).parse_args(), sys.argv[1:])

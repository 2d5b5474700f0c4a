"""Log lines: shown unless the program has handlers of its own; as text or JSON; with the id of the request that they are about."""

import json
import logging
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from transom_core.logs import JsonLines, TextLines, about_request, request_log_scope, trace_id_of


@pytest.mark.parametrize("log_format", ["text", pytest.param("json", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "setup",
    [
        "",
        pytest.param("logging.basicConfig(level=logging.INFO)", marks=pytest.mark.exhaustive),
        pytest.param("logging.basicConfig()", marks=pytest.mark.exhaustive),
    ],
    ids=["plain", "own handler", "own root level"],
)
def test_a_program_shows_where_the_memory_went_once_and_imports_no_server(
    tiny_model: Path, setup: str, log_format: str
) -> None:
    """A second start, at the program's own level, shows nothing; other loggers' lines stay as they are; without tracing nothing of
    OpenTelemetry is imported."""
    code = (
        f"import logging, sys; {setup}\n"
        "from transom_worker import LLM, SamplingParams\n"
        "for _ in range(2):\n"
        f"    llm = LLM({str(tiny_model)!r}, kv_cache_memory_bytes='4MiB', num_threads=1, log_format='{log_format}')\n"
        "    llm.generate('x', SamplingParams(max_tokens=2), use_tqdm=False); llm.shutdown()\n"
        "    logging.getLogger('transom').setLevel(logging.ERROR)\n"
        "logging.getLogger('another').warning('is left alone')\n"
        "print(*{name.partition('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=240, capture_output=True, text=True)
    for part in ("activations", "bytes per block", "at once run"):
        assert done.stderr.count(part) == 1, done.stderr
    assert done.stderr.splitlines()[-1] in ("is left alone", "WARNING:another:is left alone")
    imported = set(done.stdout.split())
    assert "transom_worker" in imported
    assert not {"ray", "fastapi", "transformers", "uvicorn", "opentelemetry"} & imported


def record(message: str, *args: object, error: BaseException | None = None, **extra: object) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("transom.worker", logging.WARNING, "file.py", 1, message, args, info)
    made.__dict__.update(extra)
    return made


def test_a_line_in_json_is_one_object_whatever_it_says() -> None:
    lines = JsonLines("worker/w0")
    message = 'two\nlines "quoted" \u2028 \x00 é \ud800'
    try:
        raise ValueError("no good")
    except ValueError as error:
        text = lines.format(record("%s", message, error=error))
    assert "\n" not in text
    line = json.loads(text)
    assert line["message"] == message
    assert line["exception"].splitlines()[-1] == "ValueError: no good"
    assert (line["level"], line["logger"], line["process"]) == ("WARNING", "transom.worker", "worker/w0")
    assert line["pid"] == os.getpid()
    assert datetime.fromisoformat(line["time"]).tzinfo is not None
    assert line["time"].endswith("Z")
    assert "request_id" not in line
    assert "trace_id" not in line


def test_a_thread_that_ends_itself_is_no_error() -> None:
    code = (
        "import sys, threading; from transom_core.logs import show_all_logs\n"
        "show_all_logs('json', 'rank/0')\n"
        "for what in (sys.exit, lambda: {}['x']): thread = threading.Thread(target=what); thread.start(); thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=240, capture_output=True, text=True)
    assert [json.loads(line)["message"] for line in done.stderr.splitlines()] == ["KeyError was not caught."]


def test_lines_name_the_request_that_they_are_about() -> None:
    as_json, as_text = JsonLines(""), TextLines()
    with request_log_scope():
        about_request("chatcmpl-1", "a1b2")
        assert (
            json.loads(as_json.format(record("x"))).items() >= {"request_id": "chatcmpl-1", "trace_id": "a1b2"}.items()
        )
        assert as_text.format(record("x")).endswith("transom.worker: [chatcmpl-1] x")
        one = record("x", request_id="cmpl-2", facts={"status": 200})
        assert json.loads(as_json.format(one)).items() >= {"request_id": "cmpl-2", "status": 200}.items()
    assert "request_id" not in json.loads(as_json.format(record("x")))
    assert as_text.format(record("x")).endswith("transom.worker: x")
    assert trace_id_of("00-0af7-b7ad-01") == "0af7"
    assert trace_id_of(None) == ""

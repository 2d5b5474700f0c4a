from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from tests.worker.simulate.tiny_model import write_model
from transom_cluster.cli import app

LINE = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}
RUNNER = CliRunner()


def arguments(tmp_path: Path, *lines: object) -> list[str]:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = write_model(tmp_path / "tiny")
    return ["bench", "simulate", "--trace", str(trace), "--model", str(model), "--memory", "16MiB"]


def test_json_is_one_object_with_every_count(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, [*arguments(tmp_path, LINE, LINE), "--arrivals", "sequential", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["requests"] == 2
    assert report["prompt_tokens"] == 1200
    assert report["hit_tokens"] == 592
    assert report["hit_share"] == 592 / 1200
    assert report["repaired_tokens"] == 0
    assert report["missed_tokens"] == {"below_alignment": 16, "never_seen": 592}
    assert report["output_tokens"] == 8
    assert report["preemptions"] == 0
    assert report["fragmentation"] >= 0
    assert report["seconds"] > 0


def test_brackets_in_names_are_no_markup(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny[red]")
    result = RUNNER.invoke(app, [*arguments(tmp_path, LINE), "--model", str(model)])
    assert result.exit_code == 0, result.output
    assert "tiny[red]" in result.stdout


def test_the_report_for_people_names_set_up_and_bounds(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, [*arguments(tmp_path, LINE, LINE), "--clairvoyant"])
    assert result.exit_code == 0, result.output
    for words in ("trace", "tiny", "49.3%", "missed, never seen", "clairvoyant", "2 requests", "8 ms a step"):
        assert words in result.stdout


def test_wrong_lines_and_settings_exit_with_2_and_one_sentence(tmp_path: Path) -> None:
    wrong = RUNNER.invoke(app, [*arguments(tmp_path, LINE, LINE | {"hash_ids": []}), "--json"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "line 2: hash_ids has 0 ids" in wrong.stderr
    host = RUNNER.invoke(app, [*arguments(tmp_path, LINE), "--host-memory", "8 GB?"])
    assert host.exit_code == 2
    assert "--host-memory" in host.stderr

"""What `make monitor` makes of the address and the keys that it is given, and which Grafana it starts."""

from pathlib import Path

import pytest
import yaml
from scripts.monitor_settings import CannotStart, first_key, grafana_command, prometheus_configuration


@pytest.mark.parametrize(
    ("url", "job"),
    [
        ("http://127.0.0.1:8000", ("http", "127.0.0.1:8000", "/metrics")),
        ("https://llm.example/", ("https", "llm.example", "/metrics")),
        ("https://llm.example/inner/llm/", ("https", "llm.example", "/inner/llm/metrics")),
    ],
)
def test_the_address_may_have_a_prefix(url: str, job: tuple[str, str, str]) -> None:
    (made,) = yaml.safe_load(prometheus_configuration(url, ""))["scrape_configs"]
    ((address,),) = [targets["targets"] for targets in made["static_configs"]]
    assert (made["scheme"], address, made["metrics_path"]) == job
    assert "authorization" not in made


def test_keys_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    for name, problem in (("gone", "cannot be read"), ("empty", "has no key")):
        with pytest.raises(CannotStart, match=problem):
            first_key(tmp_path / name)


def test_an_older_grafana_is_started_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/defaults.ini").touch()
    program = tmp_path / "bin/grafana-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert grafana_command() == [str(program), "--homepath", str(tmp_path)]
    program.unlink()
    assert grafana_command() is None

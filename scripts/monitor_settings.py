"""What `make monitor` tells Prometheus and Grafana: the files of `deploy/monitoring/`, bent to one server on this machine."""

import shutil
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
MONITORING = ROOT / "deploy/monitoring"
DASHBOARDS = ROOT / "dashboards/json"
HOST = "127.0.0.1"
GRAFANA_HOMES = (Path("/usr/share/grafana"), Path("/opt/homebrew/opt/grafana/share/grafana"))


class CannotStart(Exception):
    """Something is missing, or did not start; the message says what to do."""


def first_key(path: Path | None) -> str:
    """The first API key of a server's file; empty without a file.

    Raises:
        CannotStart: the file cannot be read or has no key.
    """
    if path is None:
        return ""
    try:
        keys = [line.strip() for line in path.read_text().splitlines()]
    except OSError as error:
        raise CannotStart(f"--api-key-file {path} cannot be read ({error.strerror}).") from None
    found = [key for key in keys if key and not key.startswith("#")]
    if not found:
        raise CannotStart(f"--api-key-file {path} has no key; give the file that the server was started with.")
    return found[0]


def prometheus_file() -> dict[str, Any]:
    """What deploy/monitoring/prometheus.yml says."""
    found: dict[str, Any] = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    return found


def prometheus_configuration(url: str, key: str) -> str:
    """deploy/monitoring/prometheus.yml over one router, without Ray's pages, which want the cluster's token.

    `url` may end in the prefix that Serve or a proxy has the app at.
    """
    given = prometheus_file()
    scheme, _, place = url.rstrip("/").partition("://")
    address, slash, prefix = place.partition("/")
    (job,) = [job for job in given["scrape_configs"] if job["job_name"] == "transom"]
    job["metrics_path"] = f"{slash}{prefix}{job['metrics_path']}"
    job |= {"scheme": scheme, "static_configs": [{"targets": [address]}], "authorization": {"credentials": key}}
    if not key:
        del job["authorization"]
    return yaml.safe_dump({**given, "rule_files": [str(MONITORING / "alerts.yml")], "scrape_configs": [job]})


def grafana_command() -> list[str] | None:
    """How Grafana's server is started here; None where it is not installed."""
    new, old = shutil.which("grafana"), shutil.which("grafana-server")
    if new is None and old is None:
        return None
    program = Path(new or old or "")
    homes = [
        home for home in (program.resolve().parent.parent, *GRAFANA_HOMES) if (home / "conf/defaults.ini").exists()
    ]
    return [str(program), *(["server"] if new else []), *(["--homepath", str(homes[0])] if homes else [])]


def grafana_environment(folder: Path, *, port: int, prometheus_url: str, url: str) -> dict[str, str]:
    """Grafana's settings: all of it in the folder and provisioned, no login, no calls home."""
    return {
        "GF_PATHS_DATA": str(folder / "grafana"),
        "GF_PATHS_LOGS": str(folder / "grafana/log"),
        "GF_PATHS_PLUGINS": str(folder / "grafana/plugins"),
        "GF_PATHS_PROVISIONING": str(MONITORING / "grafana/provisioning"),
        "GF_SERVER_HTTP_ADDR": HOST,
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Editor",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": str(DASHBOARDS / "transom-overview.json"),
        "PROMETHEUS_URL": prometheus_url,
        "SCRAPE_INTERVAL": prometheus_file()["global"]["scrape_interval"],
        "TRANSOM_URL": url.rstrip("/"),
        "TRANSOM_DASHBOARDS": str(DASHBOARDS),
    }

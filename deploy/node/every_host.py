"""What `ray up` and `ray down` leave out for on-premise workers; to be run on the head.

    python ~/transom/every_host.py update    copy ~/transom to the workers and run the setup commands there, while Ray goes on
    python ~/transom/every_host.py rejoin    the same on workers that the cluster lacks, and start Ray there
    python ~/transom/every_host.py stop      let answers end, then stop Ray here and on every worker

`ray up` on a cluster that runs restarts the head, and with it everything; `--no-restart` changes the head alone. A worker that was
lost is started again by itself, once: after a try that failed (an empty disk, a quarter of an hour without ssh) never again. `ray
down` stops the head alone; the workers would go on for most of a minute and keep their GPUs.
"""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve

CONFIG = Path("~/ray_bootstrap_config.yaml").expanduser()  # what `ray up` left here: the cluster's YAML
SSH = "ssh -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -o ConnectTimeout=5"
STOP = ". ~/transom/env.sh; ray stop --grace-period 15; ray stop --force"  # by itself it leaves what takes longer
STOP_TIMEOUT_S = 60.0
UPDATE_TIMEOUT_S = 1800.0
START_TIMEOUT_S = 120.0


def main(action: str) -> int:
    """Do it; 1 if a worker could not be reached or a command failed there, which is then printed."""
    config = yaml.safe_load(CONFIG.read_text())
    workers = config["provider"]["worker_ips"]
    if action == "stop":
        end_app()
        subprocess.run(["bash", "-c", STOP], timeout=STOP_TIMEOUT_S, check=True)  # else it starts the workers again
    elif action == "rejoin":
        present = alive()
        workers = [worker for worker in workers if worker not in present]
    with ThreadPoolExecutor(max_workers=32) as pool:
        problems = [problem for problem in pool.map(lambda worker: attempt(action, worker, config), workers) if problem]
    print("\n".join(problems) or f"{action}: done on {len(workers)} workers.")
    return 1 if problems else 0


def alive() -> set[str]:
    """The addresses of the cluster's hosts."""
    ray.init(address="auto", log_to_driver=False)
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def end_app() -> None:
    """Drain and end what Serve runs; nothing to do where Ray does not run."""
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError:
        return
    serve.shutdown()
    ray.shutdown()


def attempt(action: str, worker: str, config: dict[str, Any]) -> str | None:
    """What went wrong on one worker, or None."""
    try:
        ACTIONS[action](worker, config)
    except subprocess.CalledProcessError as error:
        return f"{worker}: {(error.stdout + error.stderr).decode(errors='replace').strip()}"
    except subprocess.TimeoutExpired as error:
        return f"{worker}: no end within {error.timeout:.0f} s."
    return None


def stop(worker: str, config: dict[str, Any]) -> None:
    """Stop Ray on one worker."""
    _run([*_ssh(config), _login(worker, config), STOP], STOP_TIMEOUT_S)


def update(worker: str, config: dict[str, Any]) -> None:
    """Bring one worker's ~/transom and what is installed from it up to date; what runs there goes on with what it has loaded."""
    source, target = f"{Path('~/transom').expanduser()}/", f"{_login(worker, config)}:transom/"
    _run(["rsync", "-a", "--delete", "-e", " ".join(_ssh(config)), source, target], UPDATE_TIMEOUT_S)
    for command in config["worker_setup_commands"]:
        _run([*_ssh(config), _login(worker, config), command], UPDATE_TIMEOUT_S)


def rejoin(worker: str, config: dict[str, Any]) -> None:
    """Update one worker and start Ray there."""
    update(worker, config)
    head = f"export RAY_HEAD_IP={config['provider']['head_ip']}; "
    for command in config["worker_start_ray_commands"]:
        _run([*_ssh(config), _login(worker, config), head + command], START_TIMEOUT_S)


ACTIONS: dict[str, Callable[[str, dict[str, Any]], None]] = {"update": update, "rejoin": rejoin, "stop": stop}


def _ssh(config: dict[str, Any]) -> list[str]:
    return [*SSH.split(), "-i", str(Path(config["auth"]["ssh_private_key"]).expanduser())]


def _login(worker: str, config: dict[str, Any]) -> str:
    return f"{config['auth']['ssh_user']}@{worker}"


def _run(command: list[str], timeout_s: float) -> None:
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=True)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ACTIONS:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))

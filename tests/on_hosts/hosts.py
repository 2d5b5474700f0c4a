"""Hosts on one machine: each with namespaces, a root and an sshd of its own, joined by a bridge that leads nowhere else.

Nothing is added to this machine's own network or mounts, and nothing needs tidying but a folder: a host's processes, interfaces and
mounts belong to namespaces that end with it, and a host ends with the process that booted it, however that ends.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
NETWORK = "10.77.0"
ADMIN = "admin"
INIT = Path(__file__).with_name("host_init.sh")
VENV = Path(sys.prefix)
PROGRAMS = {
    "ip": "iproute2",
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "rsync": "rsync",
    "setpriv": "util-linux",
}
DIES_WITH_ME = ["setpriv", "--pdeathsig", "KILL", "--"]
BOOT_TIMEOUT_S = 20.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class HostError(Exception):
    """A command on a host failed, or a host did not boot; with what it printed."""


def missing() -> str | None:
    """What these tests need and this machine lacks, for people; None where nothing is missing."""
    lacking = [package for program, package in PROGRAMS.items() if shutil.which(program, path=PATH) is None]
    if os.geteuid() != 0:
        return "make test-cluster needs root: it makes namespaces."
    if lacking:
        return f"make test-cluster needs more programs: apt-get install -y --no-install-recommends {' '.join(lacking)}"
    return None


@dataclass(frozen=True, slots=True)
class Host:
    """A booted host. `process` outside holds the namespaces, `pid` is its process 1 as seen from outside."""

    name: str
    address: str
    process: subprocess.Popen[bytes]
    pid: int
    log: Path

    @property
    def files(self) -> Path:
        """Its root folder, from outside."""
        return Path(f"/proc/{self.pid}/root")

    def command(self, shell: str) -> list[str]:
        """What to run here for `shell` to run there, as root in its home folder."""
        environment = ["HOME=/root", "LANG=C.UTF-8", "TERM=dumb", f"PATH={VENV}/bin:{PATH}"]
        inside = ["nsenter", "-t", str(self.pid), "-n", "-p", "-m", "-u", "-i", "-r", "-w"]
        return [*DIES_WITH_ME, *inside, "env", "-i", *environment, "bash", "-c", f"cd; {shell}"]

    def run(self, shell: str, *, timeout_s: float) -> str:
        """The output of a command, both kinds.

        Raises:
            HostError: it failed or took longer.
        """
        try:
            done = subprocess.run(
                self.command(shell),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
                text=True,
            )
        except subprocess.TimeoutExpired as error:
            output = error.output.decode(errors="replace") if isinstance(error.output, bytes) else str(error.output)
            raise HostError(f"{self.name}: {shell}\ntook longer than {timeout_s} s:\n{output}") from None
        if done.returncode:
            raise HostError(f"{self.name}: {shell}\nended with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def start(self, shell: str) -> subprocess.Popen[str]:
        """A command that runs meanwhile; its output can be read line by line."""
        return subprocess.Popen(self.command(shell), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)

    def power_off(self) -> None:
        """Every process of the host ends at once, and its interface is gone: no other host gets a message."""
        self.process.kill()
        self.process.wait()


class Hosts:
    """Boots hosts by name; closing it ends all of them."""

    def __init__(self, scratch: Path, names: Sequence[str]) -> None:
        self._scratch = scratch
        self._addresses = {name: f"{NETWORK}.{10 + i}" for i, name in enumerate(names, start=1)}
        self._booted: dict[str, Host] = {}
        self._namespaces: set[str] = set()
        self._keys = scratch / "keys"
        self._make_keys()
        self._switch = subprocess.Popen([*DIES_WITH_ME, "unshare", "--net", "sleep", "infinity"])
        _wait(lambda: _namespace(self._switch.pid, "net") != _namespace("self", "net"), "the switch")
        self._on_switch("link add bridge0 type bridge")
        self._on_switch("link set bridge0 up")

    def __getitem__(self, name: str) -> Host:
        return self._booted[name]

    def boot(self, name: str) -> Host:
        """A host that answers ssh; one that was powered off has its files back, but for /tmp.

        Raises:
            HostError: it did not boot; with its console.
        """
        folder = self._scratch / name
        folder.mkdir(exist_ok=True)
        log = self._scratch / f"{name}.log"
        unshare = ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child=SIGKILL"]
        with log.open("wb") as console:
            process = subprocess.Popen(
                [*DIES_WITH_ME, *unshare, "bash", str(INIT), name, str(folder), str(self._keys), str(VENV)],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
            )
        try:
            pid = int(_wait(lambda: _children(process.pid), f"{name}'s first process")[0])
            self._plug_in(name, process.pid)
            _wait(lambda: "Server listening" in log.read_text(), f"{name}'s sshd")
        except HostError as error:
            process.kill()
            raise HostError(f"{error}\n{log.read_text()}") from None
        self._namespaces.add(_namespace(pid, "pid"))
        self._booted[name] = Host(name, self._addresses[name], process, pid, log)
        return self._booted[name]

    def close(self) -> None:
        """Power off everything, and wait until the system has taken it away."""
        for host in self._booted.values():
            host.power_off()
        self._switch.kill()
        self._switch.wait()
        _wait(lambda: not self.processes(), "the processes of hosts that are off to be gone")

    def processes(self) -> list[int]:
        """What lives in any namespace that a host had."""
        return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _namespace(pid, "pid") in self._namespaces]

    def address(self, name: str) -> str:
        """Where a host is, booted or not."""
        return self._addresses[name]

    def _make_keys(self) -> None:
        self._keys.mkdir()
        for key in ("id", "host_key"):
            _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._keys / key))
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._addresses.items())]
        (self._keys / "hosts").write_text("\n".join(lines) + "\n")

    def _plug_in(self, name: str, pid: int) -> None:
        port, address = f"to-{name}"[:15], self._addresses[name]
        _wait(lambda: port not in self._on_switch("-o link"), f"the old port of {name} to go")
        self._on_switch(f"link add {port} type veth peer name eth0 netns {pid}")
        self._on_switch(f"link set {port} master bridge0 up")
        inside = ["nsenter", "-t", str(pid), "-n", "ip"]
        _call(*inside, "link", "set", "lo", "up")
        _call(*inside, "address", "add", f"{address}/24", "dev", "eth0")
        _call(*inside, "link", "set", "eth0", "up")
        _call(*inside, "route", "add", "default", "dev", "eth0")  # Ray asks the default route for its own address

    def _on_switch(self, ip_arguments: str) -> str:
        return _call("nsenter", "-t", str(self._switch.pid), "-n", "ip", *ip_arguments.split())


def _call(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20, check=False, text=True)
    if done.returncode:
        raise HostError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}")
    return done.stdout


def _wait(look: Callable[[], T], what: str) -> T:
    give_up_s = time.monotonic() + BOOT_TIMEOUT_S
    while not (seen := look()):
        if time.monotonic() > give_up_s:
            raise HostError(f"Waited {BOOT_TIMEOUT_S:.0f} s for {what}.")
        time.sleep(0.02)
    return seen


def _namespace(pid: int | str, kind: str) -> str:
    """Its name; empty for a process that is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

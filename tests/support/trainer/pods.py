"""Trainer pods without Kubernetes: real agents, each PID 1 of its own PID, network and UTS namespace.

As in a cluster, pods have distinct host names and addresses, UID 54321 without a passwd entry and no privileges. One
bridge connects them. The plan and the report are files. Namespaces need root.
"""

import contextlib
import datetime
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dlcontract import CheckpointRef, DatasetRef, ModelRef, Plan, Rank, Report

UID = 54321
JOB_UID = "5f0c9a52-2f6b-4c7e-9d51-0a1b2c3d4e5f"
AGENT_PORT, METRICS_PORT = 7470, 9470
CGROUPS = Path("/sys/fs/cgroup")
BRIDGE = "dlt-bridge{}"
_counter = itertools.count()
WITHIN_S = 60.0
"""Time limit for events that take about a second on an idle machine."""


class Authority:
    """A job's CA and one certificate signed by it, as the operator creates them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        ca = self._sign("dljob ca", ca_key, ca_key, "dljob ca", is_ca=True)
        certificate = self._sign("dljob agent", key, ca_key, "dljob ca", is_ca=False)
        (directory / "ca.crt").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
        (directory / "tls.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (directory / "tls.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )

    def _sign(self, name: str, key: Any, ca_key: Any, issuer: str, *, is_ca: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .sign(ca_key, hashes.SHA256())
        )


SHARED_MEMORY = "OMPI_MCA_btl_sm_backing_directory"
"""Variable of all test pods: the folder of Open MPI's shared memory."""


@dataclass
class Pod:
    """One pod. ``agent`` is the ``unshare`` process whose child is the agent, or None while the pod is down."""

    name: str
    address: str
    namespace: str
    directory: Path
    command: list[str]
    environ: dict[str, str]
    agent: subprocess.Popen[bytes] | None = None
    starts: int = 0
    cgroup: Path | None = None

    def limit_memory(self, nbytes: int) -> None:
        """Give the pod a memory cgroup, mounted at the root of the hierarchy as in a container."""
        version_2 = (CGROUPS / "cgroup.controllers").exists()
        hierarchy = CGROUPS if version_2 else CGROUPS / "memory"
        self.cgroup = hierarchy / self.namespace
        self.cgroup.mkdir()
        limit = "memory.max" if version_2 else "memory.limit_in_bytes"
        (self.cgroup / limit).write_text(str(nbytes))
        at = self.command.index("sh")
        enter = f'echo $$ > {self.cgroup}/cgroup.procs && mount --bind {self.cgroup} {hierarchy} && exec "$@"'
        self.command[at:at] = ["sh", "-c", enter, "sh"]

    def start(self, **environ: str) -> None:
        self.starts += 1
        with self.log.open("ab") as output:
            self.agent = subprocess.Popen(
                self.command, env=self.environ | environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def pids(self) -> list[int]:
        """Return the host's PIDs of this pod's processes, the agent first."""
        assert self.agent is not None
        children = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text().split()
        if not children:
            return []
        init = int(children[0])
        space = Path(f"/proc/{init}/ns/pid").readlink()
        pids = [init]
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and int(entry.name) != init and (entry / "ns/pid").readlink() == space:
                    pids.append(int(entry.name))
        return pids

    def command_lines(self) -> list[str]:
        """Return the command lines of the pod's processes."""
        lines = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                lines.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        return lines

    def process(self, pid: int) -> int:
        """Return the host's PID of the pod's process ``pid``."""
        for host_pid in self.pids():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{host_pid}/status").read_text()
                numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
                if int(numbers[-1]) == pid:
                    return host_pid
        raise LookupError(f"pod {self.name} has no process {pid}")

    def signal(self, number: int) -> None:
        """Send a signal to the agent."""
        os.kill(self.pids()[0], number)

    def wait(self, within_s: float = WITHIN_S) -> int:
        """Wait for the agent and return its exit code."""
        assert self.agent is not None
        try:
            return self.agent.wait(within_s)
        finally:
            if self.agent.poll() is not None:
                self.agent = None

    def listening(self) -> set[int]:
        """Return the TCP ports that other pods can connect to."""
        ports = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.pids()[0]}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                address, _, port = local.partition(":")
                loopback = address in ("0100007F", "00000000000000000000000001000000")
                if state == "0A" and not loopback:
                    ports.add(int(port, 16))
        return ports

    def link(self, state: str) -> None:
        """Disconnect (``down``) or connect (``up``) the pod's network."""
        _ip("link", "set", f"v{self.namespace}", state)

    def kill(self) -> None:
        """Kill PID 1 and with it all processes of the pod, as a power failure would."""
        if self.agent is not None:
            for pid in self.pids()[:1]:
                os.kill(pid, signal.SIGKILL)
            self.agent.wait()
            self.agent = None

    def get(self, path: str) -> tuple[int, str]:
        """Return the status and the body of a response of the pod's HTTP server."""
        try:
            with urllib.request.urlopen(f"http://{self.address}:{METRICS_PORT}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@dataclass
class Job:
    """A job's pods, plan and report."""

    directory: Path
    pods: list[Pod]
    plan_file: Path
    report_file: Path
    checkpoints: Path
    authority: Authority

    def start(self, plan: Plan, **environ: str) -> None:
        self.put(plan)
        for pod in self.pods:
            pod.start(**environ)

    def put(self, plan: Plan) -> None:
        temporary = self.plan_file.with_suffix(".new")
        temporary.write_text(plan.to_json())
        temporary.replace(self.plan_file)

    def plan(
        self, command: list[str] | None = None, *, ranks: int | None = None, per_pod: int = 1, **fields: Any
    ) -> Plan:
        """Return a plan with ``per_pod`` ranks per pod, at most ``ranks``. ``command`` replaces the built-in model."""
        count = min(ranks or 2**31, per_pod * len(self.pods))
        places = [(self.pods[i // per_pod], i % per_pod) for i in range(count)]
        base: dict[str, Any] = {
            "job": "test", "namespace": "default", "uid": JOB_UID, "number": 1,
            "ranks": tuple(
                Rank(rank=i, pod=pod.name, host=pod.address, group="cpu", device="cpu", local_rank=local,
                     share=60 // count + (i < 60 % count))
                for i, (pod, local) in enumerate(places)
            ),
            "global_batch": 60,
            "model": ModelRef(command=tuple(command)) if command else ModelRef(name="digits-cnn"),
            "dataset": DatasetRef(name="digits"),
            "steps": 10,
            "min_ranks": count,
            "checkpoint": CheckpointRef(directory=str(self.checkpoints)),
            "grace_s": 10.0,
        }  # fmt: skip
        return Plan(**(base | fields))

    @property
    def report(self) -> Report | None:
        return Report.parse(self.report_file.read_bytes()) if self.report_file.exists() else None

    def until(self, condition: Callable[[Report], object], within_s: float = WITHIN_S) -> Report:
        """Wait for the first report that meets the condition and return it."""
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            report = self.report
            if report is not None and condition(report):
                return report
            time.sleep(0.02)
        raise AssertionError(f"not within {within_s:.0f} s; report: {self.report}\n{self.logs()}")

    def wait(self, condition: Callable[[], object], within_s: float = WITHIN_S) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not within {within_s:.0f} s; report: {self.report}\n{self.logs()}")
            time.sleep(0.02)

    def logs(self) -> str:
        return "\n".join(f"--- {pod.name}\n{pod.text()[-6000:]}" for pod in self.pods)


def _claim_network() -> int:
    """Return the number of a network that no other test uses. Creating its bridge a second time would fail."""
    for number in range(256):
        made = subprocess.run(
            ["ip", "link", "add", BRIDGE.format(number), "type", "bridge"], capture_output=True, text=True, check=False
        )
        if made.returncode == 0:
            return number
        assert "File exists" in made.stderr, made.stderr
    raise AssertionError("found 256 bridges of tests; expected a free one: delete them (ip link show type bridge)")


@contextlib.contextmanager
def job(count: int) -> Iterator[Job]:
    """Create a job of ``count`` pods that are not started yet, and remove it afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="dlt-", dir="/tmp"))
    authority = Authority(directory / "tls")
    for name in ("checkpoints", "exchange"):
        (directory / name).mkdir()
    made = Job(
        directory, [], directory / "exchange/plan.json", directory / "exchange/report.json", directory / "checkpoints", authority
    )  # fmt: skip
    number = _claim_network()
    # Private addresses, as pods usually have. PRRTE does not connect a private address to a public one.
    network, bridge = f"10.199.{number}", BRIDGE.format(number)
    tag = f"{os.getpid():x}-{next(_counter):x}"  # unique, since the kernel frees a namespace after its name
    try:
        _ip("address", "add", f"{network}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for i in range(count):
            made.pods.append(_pod(made, f"test-cpu-{i}", f"{network}.{i + 1}", f"dlt{tag}{i}", bridge))
        for path in (directory, *directory.rglob("*")):
            os.chown(path, UID, 0)
        yield made
    finally:
        for pod in made.pods:
            pod.kill()
            if pod.cgroup is not None:
                processes = pod.cgroup / "cgroup.procs"
                made.wait(partial(_is_empty, processes))
                pod.cgroup.rmdir()
            _ip("netns", "delete", pod.namespace)
        subprocess.run(["ip", "link", "delete", bridge], check=False)
        shutil.rmtree(directory)


def _is_empty(processes: Path) -> bool:
    return not processes.read_text()


def _pod(made: Job, name: str, address: str, namespace: str, bridge: str) -> Pod:
    directory = made.directory / name
    (directory / "tmp").mkdir(parents=True)
    (directory / "memory").mkdir()
    (directory / "shm").mkdir()
    _ip("netns", "add", namespace)
    _ip("link", "add", f"v{namespace}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _ip("link", "set", f"v{namespace}", "master", bridge, "up")
    _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
    _ip("-n", namespace, "link", "set", "eth0", "up")
    _ip("-n", namespace, "link", "set", "lo", "up")
    # The capability to read is needed if the interpreter is in root's home. In an image, anyone can read it.
    drop = ["setpriv", "--reuid", str(UID), "--regid", "0", "--clear-groups", "--no-new-privs",
            "--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]  # fmt: skip
    command = ["nsenter", f"--net=/run/netns/{namespace}", "unshare", "--uts", "--pid", "--fork", "--mount-proc",
               "sh", "-c", 'hostname "$0" && exec "$@"', name, *drop, sys.executable, "-m", "dltrain.agent.main"]  # fmt: skip
    root = Path(__file__).resolve().parents[3]
    environ = {
        "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": f"{root / 'operator' / 'contract'}:{root / 'trainer-image'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(directory / "tmp"),
        "DLJOB_NAME": "test", "DLJOB_NAMESPACE": "default", "DLJOB_UID": JOB_UID,
        "DLJOB_POD": name, "DLJOB_POD_IP": address, "DLJOB_API": "off",
        "DLTRAIN_PLAN_FILE": str(made.plan_file), "DLTRAIN_REPORT_FILE": str(made.report_file),
        "DLTRAIN_TLS_DIR": str(made.authority.directory), "DLTRAIN_MEMORY_DIR": str(directory / "memory"),
        # Real pods have a /dev/shm each. In the PID namespaces of these, processes of different tests have equal numbers,
        # so that Open MPI gives its segments in /dev/shm equal names, and one test removed those of another.
        SHARED_MEMORY: str(directory / "shm"),
        "DLTRAIN_RETURN_AFTER_S": "3",
        "DLTRAIN_HANG_MIN_S": "5",
    }  # fmt: skip
    return Pod(name, address, namespace, directory, command, environ)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def leave(made: Job, within_s: float = WITHIN_S) -> list[int]:
    """Ask all agents to stop, as the deletion of a job does, and return their exit codes."""
    for pod in made.pods:
        pod.signal(TERM)
    deadline_s = time.monotonic() + within_s
    return [pod.wait(deadline_s - time.monotonic()) for pod in made.pods]


def stopped(pid: int) -> bool:
    """Return True if a process of the host is stopped, for example by SIGSTOP."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


KILL, TERM, STOP, CONT = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGCONT


def logged_rank(pod: Pod, rank: int) -> int:
    """Return the host's process number of the rank's current process, from its log."""
    numbers = re.findall(rf"rank {rank} of \d+ is process (\d+)", pod.text())
    return pod.process(int(numbers[-1]))


def rank_processes(pod: Pod) -> list[int]:
    """Return the PIDs of the ranks, which are forks of the zygote with the same command line."""
    zygotes = [pid for pid in pod.pids() if b"dltrain.launch.zygote" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return [pid for pid in zygotes if int(Path(f"/proc/{pid}/stat").read_text().split()[3]) in zygotes]


def rank_process(pod: Pod) -> int:
    """Return the PID of the pod's only rank."""
    (rank,) = rank_processes(pod)
    return rank


def process(pod: Pod, program: str) -> int:
    """Return the PID of the pod's process with this name."""
    (pid,) = [pid for pid in pod.pids() if Path(f"/proc/{pid}/comm").read_text().strip() == program]
    return pid


def steps_in_memory(pod: Pod) -> list[int]:
    """Return the steps of the checkpoints in the pod's memory."""
    return [int(path.name.removeprefix("step-")) for path in (pod.directory / "memory").glob("*/step-*")]

"""Tests of launching ranks and of their environment: mpirun, the shim, settings, cgroups and network interfaces."""

import platform
import sys
import tempfile
from pathlib import Path

import pytest

from dlcontract import CheckpointRef, ModelRef, Plan
from dlcontract.pods import MPI_NETWORK_VARIABLES, RANK_VARIABLES
from dltrain.agent.job.settings import Settings, complete_environment
from dltrain.host import cgroup
from dltrain.host.network_interfaces import interface_of
from dltrain.launch import commands, loopback, rank_environment
from dltrain.launch.shim import parse_request, request
from dltrain.launch.spawn import is_this_python
from dltrain.launch.zygote import can_run
from dltrain.protocol.rank_messages import EXIT_STOPPED
from support.trainer.plans import make_plan
from support.trainer.ranks import BODIES, run


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("memory.events", "low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\noom_group_kill 0\n", 2),
        ("memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n", 7),
        ("unrelated", "", None),
    ],
    ids=["v2", "v1", "neither"],
)
def test_oom_kills_are_read_from_the_cgroup(tmp_path: Path, name: str, text: str, count: int | None) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert cgroup.oom_kills(tmp_path) == count


@pytest.mark.parametrize(("files", "free"), [
    ({}, 4096),
    ({"memory.max": "max", "memory.current": "900", "memory.stat": "inactive_file 1"}, 4096),
    ({"memory.max": "1000", "memory.current": "900", "memory.stat": "anon 5\ninactive_file 50"}, 150),
    ({
        "memory/memory.limit_in_bytes": "1000",
        "memory/memory.usage_in_bytes": "600",
        "memory/memory.stat": "total_inactive_file 7",
    }, 407),
])  # fmt: skip
def test_free_memory_is_the_minimum_of_machine_and_container(files: dict[str, str], free: int, tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    4 kB\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cgroup.free_nbytes(tmp_path, meminfo) == free
    assert cgroup.free_nbytes(tmp_path, tmp_path / "none") == (None if free == 4096 else free)


DAEMON = (
    "PRTE_PREFIX=/usr;export PRTE_PREFIX;LD_LIBRARY_PATH=/usr/lib:$LD_LIBRARY_PATH;export LD_LIBRARY_PATH;"
    '/usr/bin/prted --prtemca ess "env" --prtemca prte_hnp_uri "prterun-p-0-7@0.0;tcp://10.0.0.1:7500:24"'
)


def test_daemon_arguments_are_extracted_from_the_command_of_mpirun() -> None:
    uri = "prterun-p-0-7@0.0;tcp://10.0.0.1:7500:24"
    assert commands.daemon_arguments(DAEMON) == ("--prtemca", "ess", "env", "--prtemca", "prte_hnp_uri", uri)
    with pytest.raises(ValueError, match="expected a command that starts prted"):
        commands.daemon_arguments("rm -rf /; prted-not")


FOUR, SIX = "10.0.0.2", "fd00::9"


@pytest.mark.parametrize(
    ("uri", "pod_ip", "port", "local"),
    [
        ("a@0.0;tcp://10.0.0.1:7500:24", FOUR, 7500, "tcp://10.0.0.2:41:24"),
        ("a@0.0;tcp://10.0.0.1,10.1.0.1:7500,7501:24,16", FOUR, 7500, "tcp://10.0.0.2:41:24"),
        ("a@0.0;tcp://10.0.0.1:7500:24;tcp6://[fd00::1]:7600:64", FOUR, 7500, "tcp://10.0.0.2:41:24"),
        ("a@0.0;tcp://10.0.0.1:7500:24;tcp6://[fd00::1]:7600:64", SIX, 7600, "tcp6://[fd00::9]:41:64"),
        ("a@0.0;tcp6://[fd00::1,fd00::2]:7600:64,64", SIX, 7600, "tcp6://[fd00::9]:41:64"),
    ],
)
def test_daemon_connects_to_a_port_of_its_own_pod(uri: str, pod_ip: str, port: int, local: str) -> None:
    arguments = ("--prtemca", "prte_hnp_uri", uri, "--prtemca", "ess", "env")
    assert commands.launcher_port(arguments, pod_ip) == port
    expected = ("--prtemca", "prte_hnp_uri", f"a@0.0;{local}", "--prtemca", "ess", "env")
    assert commands.with_launcher_port(arguments, pod_ip, 41) == expected


@pytest.mark.parametrize("uri", ["", "a@0.0;udp://10.0.0.1:7500:24", "a@0.0;tcp6://[fd00::1]:7600:64"])
def test_daemon_without_an_address_of_mpirun_is_refused(uri: str) -> None:
    arguments = ("--prtemca", "prte_hnp_uri", uri) if uri else ()
    with pytest.raises(ValueError, match="mpirun: found"):
        commands.launcher_port(arguments, FOUR)


def test_daemon_uses_the_settings_of_its_own_pod() -> None:
    env = commands.mpi_environment({}, Path("/lib/own.so"), "net1", "1.1", Path("/run/own"))
    received = ("--leave-session-attached", "--prtemca", "prte_if_include", "eth0", "--prtemca", "ess", "env")
    assert commands.without_others_settings(received, env) == ("--leave-session-attached", "--prtemca", "ess", "env")


def test_mpirun_command_has_pod_names_and_one_slot_per_rank() -> None:
    pods = ("p-0", "p-0", "p-1")
    ranks = [
        {"rank": i, "pod": pod, "host": "h", "group": "g", "device": "cpu", "share": 1} for i, pod in enumerate(pods)
    ]
    made = Plan(**(make_plan(3, global_batch=3).model_dump(by_alias=True) | {"ranks": ranks}))
    command = commands.mpirun_command(made, "p-0", "own-name", as_root=False)
    assert command[command.index("--host") + 1] == "own-name:2,p-1:1"
    assert command[command.index("-n") + 1] == "3" and "--allow-run-as-root" not in command


def test_ranks_of_a_pod_must_be_consecutive() -> None:
    ranks = [{"rank": i, "pod": f"p-{i % 2}", "host": "h", "group": "g", "device": "cpu", "share": 1} for i in range(3)]
    with pytest.raises(ValueError, match="expected consecutive rank numbers in each pod"):
        commands.mpirun_command(
            Plan(**(make_plan(3, global_batch=3).model_dump(by_alias=True) | {"ranks": ranks})),
            "p-0",
            "p-0",
            as_root=False,
        )


def test_ports_match_the_contract_and_are_disjoint() -> None:
    from dlcontract import MPI_PORTS

    assert (
        MPI_PORTS[0] == commands.RANK_PORTS[0] < commands.RANK_PORTS[1] < rank_environment.MASTER_PORT == MPI_PORTS[1]
    )


def test_last_message_of_an_ended_rank_survives_a_stop_request(tmp_path: Path) -> None:
    ended = run([sys.executable, str(BODIES / "faults/last_words.py"), str(tmp_path)])
    assert ended.output == f"['checkpointed'] {EXIT_STOPPED}\n" and ended.code == 0, ended.output


def test_no_rank_goes_on_if_its_attempt_ends_while_it_starts(tmp_path: Path) -> None:
    """Fixed bug: a rank that started in the same moment ran on, and the agent waited for its end without a limit."""
    ended = run([sys.executable, str(BODIES / "faults/ended_while_starting.py"), str(tmp_path)])
    assert ended.output.endswith("no rank runs\n") and ended.code == 0, ended.output


def test_shim_forwards_only_variables_of_mpi() -> None:
    environ = {"PMIX_RANK": "1", "OMPI_X": "a=b\nc", "OPAL_PREFIX": "/usr", "SECRET": "no", "PATH": "/bin"}
    data = request(["rank", ""], environ)
    assert int(data[:8]) == len(data) - 8
    assert parse_request(data[8:]) == (["rank", ""], {"PMIX_RANK": "1", "OMPI_X": "a=b\nc", "OPAL_PREFIX": "/usr"})


def test_zygote_runs_commands_of_this_python(tmp_path: Path) -> None:
    beside = {"PATH": str(Path(sys.executable).parent)}
    assert is_this_python("python", beside) and is_this_python(sys.executable, {})
    assert not is_this_python("python", {"PATH": str(tmp_path)}) and not is_this_python("sh", beside)
    (tmp_path / "python").symlink_to(sys.executable)
    assert not is_this_python("python", {"PATH": str(tmp_path)}), "the same binary, but other packages"
    assert can_run(("train.py", "--lr", "1")) and can_run(("-u", "train.py")) and not can_run(("-u",))
    assert can_run(("-m", "x")) and can_run(("-c", "x"))
    assert not can_run(()) and not can_run(("-m",)) and not can_run(("-O", "train.py")) and not can_run(("-",))


def test_settings_errors_name_the_variable() -> None:
    good = {
        "DLJOB_NAME": "j", "DLJOB_UID": "u", "DLJOB_POD": "p-0", "DLJOB_POD_IP": "10.0.0.1", "DLTRAIN_RUN_DIR": "/tmp/r"
    }  # fmt: skip
    assert Settings.of(good).use_api
    for change, message in (
        ({"DLJOB_POD_IP": ""}, "DLJOB_POD_IP: found nothing"),
        ({"DLJOB_API": "off"}, "DLTRAIN_PLAN_FILE: found nothing"),
        ({"DLTRAIN_AGENT_PORT": "x"}, "DLTRAIN_AGENT_PORT: found 'x'; expected a TCP port"),
        ({"DLTRAIN_RUN_DIR": "/tmp/" + 100 * "x"}, "too long"),
    ):
        with pytest.raises(ValueError, match=message):
            Settings.of(good | change)


def test_environment_is_completed_for_a_user_without_home(tmp_path: Path) -> None:
    assert complete_environment({"HOME": "/proc/none"})["HOME"] == tempfile.gettempdir()
    assert complete_environment({"HOME": str(tmp_path)})["HOME"] == str(tmp_path)
    assert complete_environment({"OPENBLAS_NUM_THREADS": "4"})["OPENBLAS_NUM_THREADS"] == "4"


@pytest.mark.parametrize("name", ["HOME", "TMPDIR"])
def test_folder_of_the_user_is_created(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "volume" / "folder"
    assert complete_environment({name: str(folder)})[name] == str(folder)
    assert folder.is_dir()


@pytest.mark.parametrize("name", ["HOME", "TMPDIR"])
def test_folder_without_permission_to_write_is_replaced_and_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert complete_environment({name: "/proc/none"})[name] == tempfile.gettempdir()
    assert f"{name}: found /proc/none" in caplog.text


def test_contract_names_the_variables_that_the_agent_sets() -> None:
    """The operator reports them if a job sets them, too."""
    plan = make_plan()
    found = rank_environment.rank_environment({}, plan, plan.ranks[0], Path("/p"), Path("/s"), Path("/m"))
    assert set(found) == set(RANK_VARIABLES)
    assert set(commands.mpi_network("eth0")) == set(MPI_NETWORK_VARIABLES)


@pytest.mark.parametrize(
    ("framework", "names"),
    [
        ("DLTrain", {"RANK", "MASTER_PORT"}),
        ("Torchrun", {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "DLJOB_CHECKPOINT_DIR"}),
        ("MPI", {"RANK", "MASTER_PORT", "DLJOB_CHECKPOINT_DIR"}),
    ],
)
def test_variables_of_the_pod_that_ranks_do_not_get_are_found(framework: str, names: set[str], tmp_path: Path) -> None:
    """Those that the agent only extends, and those of which the job's own value takes precedence, have an effect."""
    pods = dict.fromkeys(("RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "DLJOB_CHECKPOINT_DIR"), "x")
    pods |= {"PATH": "/bin", "PYTHONPATH": "/lib", "LD_LIBRARY_PATH": "/lib", "MPI4PY_MPIABI": "x", "TOKEN": "x"}
    pods |= {"NCCL_SOCKET_IFNAME": "eth1"}
    command = () if framework == "DLTrain" else ("python", "train.py")
    checkpoint = CheckpointRef(directory=str(tmp_path))
    plan = make_plan(model=ModelRef(command=command, framework=framework), checkpoint=checkpoint)
    ranks = rank_environment.rank_environment(pods, plan, plan.ranks[0], tmp_path, tmp_path, tmp_path)
    ranks = rank_environment.torch_network("eth0") | ranks
    ranks |= rank_environment.framework_environment(plan, plan.ranks[0], "a.1", ranks, tmp_path)
    assert rank_environment.replaced_variables(pods, ranks) == names


def test_network_interface_is_found_by_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match="expected the address of one of"):
        interface_of("192.0.2.250")


def test_library_of_the_launcher_is_tried_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "__file__", str(tmp_path / "loopback.py"))
    loopback.library.cache_clear()
    with pytest.raises(OSError, match="found no such file; expected the library"):
        loopback.library()
    (tmp_path / f"loopback-{platform.machine()}.so").write_bytes(b"no ELF file")
    with pytest.raises(OSError, match="cannot be preloaded"):
        loopback.library()
    monkeypatch.undo()
    loopback.library.cache_clear()
    assert loopback.library().is_file()

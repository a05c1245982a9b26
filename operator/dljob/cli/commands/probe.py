"""``dljob probe``: measure the hardware of device types, so that first plans need no data sheets."""

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from dlcontract.hardware import MAX_STRUCTURES, HardwareMeasure
from dlcontract.structures import MIN_STRUCTURES
from dljob.api.defaults import NO_DEFAULTS
from dljob.api.profiles.profile import HardwareProfile
from dljob.cli import probe_pods, remote, seconds
from dljob.cli.hardware_tables import hardware_table, link_table
from dljob.client import operator_pods, preview
from dljob.client.errors import BadInputError
from dljob.cluster import ClusterView
from dljob.job.observed import JOB_LABEL
from dljob.job.probes.hardware import hardware_body, hardware_of, hardware_profile
from dljob.job.probes.links import links_to_measure
from dljob.job.probes.targets import is_annotated, link_target, probe_targets
from dljob.render.helpers.probe import ProbeImage, with_defaults

LOCAL_LIMIT_S, STRUCTURES_LIMIT_S = 180.0, 480.0
TIMEOUT_S, STRUCTURES_TIMEOUT_S = 300.0, 600.0


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "probe",
        help="measure the hardware of nodes, for the first plan of new models",
        description="Run the trainer image's hardware probe for 10 to 20 seconds on one free node of each device type "
        "that was not measured. Print a table of data sheet and measurement, and store a DLProfile for each type. "
        "Later plans use it until a run has measured the model itself. The pods are deleted afterwards.",
        epilog="The command exits with 1 if a type could not be measured. docs/how-to/measure-your-pool.md lists the "
        "permissions that it needs.",
    )
    command.add_argument(
        "--device", metavar="TYPE", action="append", default=[], help="only this type, also if it was measured before"
    )
    command.add_argument("--node", metavar="NODE", help="measure on this node")
    command.add_argument(
        "--link",
        action="store_true",
        help="also measure the network between two nodes of each type, and between nodes of two types of a kind",
    )
    command.add_argument(
        "--structures",
        metavar="N",
        type=int,
        help=f"also train N random networks on CPU types, about 1 s each ({MIN_STRUCTURES} to {MAX_STRUCTURES}), some "
        "of them also on several ranks, and refit the regression that predicts step times and memory from layers",
    )
    command.add_argument("--image", help="image with the probe (default: the operator's trainer image)")
    command.add_argument(
        "-n", "--namespace", metavar="NAME", help="namespace of the pods (default: that of the operator)"
    )
    remote.add_cluster(command)
    command.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="limit for each pod (default: 300, with --structures 600)",
    )
    command.add_argument(
        "--local", action="store_true", help="measure this machine, without a cluster (needs the package dltrain)"
    )
    command.add_argument(
        "--output",
        metavar="FILE",
        help="with --local: write the profile here (default: hardware-profile.yaml), for dljob plan --profiles",
    )
    command.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    seconds.check(given, "timeout", zero=False)
    if given.structures is not None and not MIN_STRUCTURES <= given.structures <= MAX_STRUCTURES:
        raise BadInputError(
            f"--structures: found {given.structures}; expected {MIN_STRUCTURES} to {MAX_STRUCTURES}. Choose a number "
            "in this range"
        )
    cluster_only = {"--node": given.node, "--link": given.link, "--image": given.image, "--namespace": given.namespace}
    if given.local:
        cluster_only |= remote.cluster_options(given)
        if wrong := [name for name, value in cluster_only.items() if value]:
            raise BadInputError(f"{wrong[0]}: found this option with --local; expected one of them. Remove {wrong[0]}")
        if len(given.device) > 1:
            raise BadInputError(f"--device: found {len(given.device)} types; expected one with --local")
        return _local(given.device, Path(given.output or "hardware-profile.yaml"), given.structures)
    if given.output is not None:
        raise BadInputError(
            "--output: found this option without --local; expected both. Without --local, the cluster stores profiles "
            "(kubectl get dlprofiles -o yaml)"
        )
    return remote.reach(lambda api: _in_cluster(api, given))


def _local(devices: Sequence[str], output: Path, structures: int | None = None) -> int:
    """Measure this machine, and write its profile as the type ``devices[0]``, or as ``cpu`` or the GPU's name.

    ``structures``: number of random networks to train, on the CPU.
    """
    if find_spec("dltrain") is None:
        raise BadInputError(
            "--local: found no Python package dltrain; expected it, with PyTorch, in this environment. Run pip install "
            "./operator/contract ./trainer-image in a clone of dljob"
        )
    command, limit_s = [sys.executable, "-m", "dltrain.hardware_probe", "--node-link"], LOCAL_LIMIT_S
    if structures is not None:
        command += ["--device", "cpu", "--structures", str(structures)]
        limit_s += STRUCTURES_LIMIT_S
    try:
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=True)
        measure = HardwareMeasure.parse(ran.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise BadInputError(f"--local: the hardware probe failed: {' '.join(str(error).split())[:300]}") from None
    device = devices[0] if devices else measure.device if measure.kind == "gpu" else "cpu"
    profile = hardware_profile(measure, device)
    _show(device, profile)
    text = yaml.safe_dump(hardware_body(profile, device, datetime.now(UTC)), sort_keys=False)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"--output: {output}: {error.strerror}") from None
    print(f"\nwritten to {output}; plan with it: dljob plan JOB.yaml --cluster CLUSTER.yaml --profiles {output}")
    return _lacks_regression(device, profile, structures)


def _lacks_regression(device: str, profile: HardwareProfile, structures: int | None) -> int:
    """Return 1 and print the reason if ``--structures`` was given, and the profile has no regression; otherwise 0."""
    if structures is None or profile.regression is not None:
        return 0
    print(
        f"dljob: {device}: found no refitted regression in the profile; expected the measurements of at least "
        f"{MIN_STRUCTURES} random networks of this release. Use the trainer image of this release with --image, or a "
        "node with more free memory",
        file=sys.stderr,
    )
    return 1


async def _in_cluster(api: Any, given: argparse.Namespace) -> int:
    from dljob.kube.kinds import POD

    state = await preview.observe(api)
    operators = state.operators
    pods = await api.find(POD, None)
    busy = {
        (pod.get("spec") or {}).get("nodeName")
        for pod in pods
        if JOB_LABEL in (pod["metadata"].get("labels") or {})
        and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
    }
    image = _image(operators, given)
    # A type that was measured before is measured again with --structures, because its profile may not have them.
    known = state.constants if given.structures is None else {}
    view = state.view.on_platforms(operator_pods.architectures(operators))
    targets, why = probe_targets(
        view, known, given.device, given.node, {name for name in busy if name}, image.tolerations
    )
    if why and not targets and why[0].startswith("--"):
        raise BadInputError(why[0])
    for line in why:
        print(f"dljob: {line}", file=sys.stderr)
    namespace = given.namespace or _namespace(operators)
    failed = sum("not measured" in line for line in why)
    timeout_s = given.timeout or (TIMEOUT_S if given.structures is None else STRUCTURES_TIMEOUT_S)
    for target in targets:
        if given.structures is not None and target.is_gpu:
            print(f"dljob: {target.device}: not measured, because --structures measures CPUs only", file=sys.stderr)
            failed += target.device in given.device or target.node == given.node
            continue
        print(f"dljob: measuring {target.device} on {target.node}", file=sys.stderr, flush=True)
        try:
            profile = await probe_pods.probed(api, namespace, target, image, timeout_s, given.link, given.structures)
        except BadInputError as error:
            print(f"dljob: {target.device}: {error}", file=sys.stderr)
            failed += 1
            continue
        complete = await probe_pods.completed(api, target.device, profile)
        name = await probe_pods.stored(api, target.device, complete)
        _show(target.device, complete)
        print(f"  stored as dlprofile/{name}", flush=True)
        failed += _lacks_regression(target.device, profile, given.structures)
    if given.link:
        nodes = frozenset(name for name in busy if name)
        devices = [node.device for node in view.nodes if node.name == given.node] or given.device
        failed += await _links(api, namespace, view, devices, nodes, image, timeout_s)
    return 1 if failed else 0


async def _links(
    api: Any,
    namespace: str,
    view: ClusterView,
    devices: Sequence[str],
    busy: Collection[str],
    image: ProbeImage,
    timeout_s: float,
) -> int:
    """Measure the links that were not measured together with a type. Return the number of those that failed.

    ``devices``: only links with an end of these types; empty: all. ``busy``: names of nodes with pods of jobs.
    """
    from dljob.kube.kinds import PROFILE

    failed, counts = 0, Counter(node.device for node in view.nodes)
    for device, end in links_to_measure(await api.find(PROFILE, None), devices, counts):
        other = end if end != device else ""
        what = f"network between nodes of {device}" + (f" and {other}" if other else "")
        if is_annotated(view, device, other):
            print(f"dljob: {what}: not measured, because annotations of nodes give its bandwidth", file=sys.stderr)
            continue
        target = link_target(view, device, busy, image.tolerations, other)
        if target is None or target.peer is None:
            print(
                f"dljob: {what}: not measured, because no two nodes are idle; expected two without pods of jobs, on "
                "which pods request at most half of the CPUs. Try again later",
                file=sys.stderr,
            )
            failed += 1
            continue
        print(f"dljob: measuring the {what}, {target.node} and {target.peer}", file=sys.stderr, flush=True)
        try:
            name, link = await probe_pods.measured_link(api, namespace, target, image, timeout_s)
        except BadInputError as error:
            print(f"dljob: {what}: {error}", file=sys.stderr)
            failed += 1
            continue
        print("\n".join(link_table((device, end), (target.node, target.peer), link)))
        print(f"  stored in dlprofile/{name}", flush=True)
    return failed


def _image(operators: Sequence[operator_pods.OperatorPod], given: argparse.Namespace) -> ProbeImage:
    """Return the image of the options or of the operator, with the administrator's defaults for pods of jobs."""
    image = given.image or operator_pods.trainer_image(operators)
    if image is None:
        raise BadInputError(
            "--image: found no operator in the cluster whose trainer image could be used; expected an image with "
            "dltrain. Name it with --image"
        )
    own = operator_pods.of_namespace(operators, given.namespace or _namespace(operators)) if operators else NO_DEFAULTS
    return with_defaults(image, own)


def _namespace(operators: Sequence[operator_pods.OperatorPod]) -> str:
    return operators[0].name.partition("/")[0] if operators else remote.default_namespace()


def _show(device: str, profile: HardwareProfile) -> None:
    print("\n".join(hardware_table(device, profile, hardware_of(profile, device))), flush=True)

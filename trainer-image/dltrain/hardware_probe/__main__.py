"""The command line of the hardware probe: ``python -m dltrain.hardware_probe``, which measures one node's hardware."""

import argparse
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dlcontract.hardware import MAX_STRUCTURES
from dlcontract.structures import MIN_STRUCTURES

if TYPE_CHECKING:
    from dlcontract.hardware import LinkRate

TERMINATION_LOG = Path("/dev/termination-log")
STEPS_S = 6.0
"""Seconds for the steps of the reference networks. With the rest, the probe takes 10 to 20 s."""
STRUCTURES_S, SEVERAL_RANKS_S = 360.0, 120.0
"""Seconds after which no further random network is trained on one core, and on several ranks, because Kubernetes ends
the pod after ten minutes."""


def main(arguments: list[str] | None = None) -> int:
    """Measure this node's hardware and print the result as JSON. Return 0, or EXIT_BAD_INPUT for unusable options."""
    parser = argparse.ArgumentParser(
        prog="python -m dltrain.hardware_probe",
        description="Measure compute, memory, disk and links of this machine in 10 to 20 seconds, and print JSON.",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument(
        "--scratch", metavar="DIR", help="folder whose disk is measured; default: the one for temporary files"
    )
    parser.add_argument("--peer", metavar="HOST:PORT", help="also measure the link to a probe that serves there")
    parser.add_argument("--only-link", action="store_true", help="with --peer: measure nothing but this link")
    parser.add_argument(
        "--serve", metavar="PORT", type=int, help="only answer peers on this TCP port, without measuring"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="with --serve: how long; default: 60")
    parser.add_argument("--node-link", action="store_true", help="also measure messages between two MPI ranks here")
    parser.add_argument(
        "--structures",
        metavar="N",
        type=int,
        help=f"also train N random networks on one core ({MIN_STRUCTURES} to {MAX_STRUCTURES}; about 1 s each), and "
        "some of them on 2 ranks and more",
    )
    given = parser.parse_args(arguments)
    from dltrain.protocol.errors import BadInputError
    from dltrain.protocol.rank_messages import EXIT_BAD_INPUT

    try:
        peer = None if given.peer is None else _peer(given.peer)
        if given.serve is not None:
            from dltrain.hardware_probe import link

            link.serve(socket.create_server(("", given.serve)), given.seconds)
            return 0
        if given.only_link:
            return _only_link(peer)
        count = given.structures
        if count is not None and not MIN_STRUCTURES <= count <= MAX_STRUCTURES:
            limits = f"{MIN_STRUCTURES} to {MAX_STRUCTURES} networks"
            raise BadInputError("--structures", str(count), limits, "choose a number in this range")
        text = _measured(given.device, _scratch(given.scratch), peer, given.node_link, count)
    except BadInputError as error:
        print(f"dltrain: BadInput: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_INPUT
    _print(text)
    return 0


def _print(text: str) -> None:
    """Print a document. In a pod, also make it the termination message."""
    if TERMINATION_LOG.exists() and os.access(TERMINATION_LOG, os.W_OK):
        TERMINATION_LOG.write_text(text, encoding="utf-8")
    print(text, flush=True)  # noqa: T201


def _only_link(peer: tuple[str, int] | None) -> int:
    """Measure the link to ``peer``, and print it as JSON. Return 0, or 1 if the peer does not answer."""
    from dltrain.protocol.errors import BadInputError

    if peer is None:
        raise BadInputError("--only-link", "no --peer", "both options", "name the other probe with --peer")
    rate, note = _far(peer)
    if rate is None:
        _print(f"dltrain: {note}")
        return 1
    _print(rate.model_dump_json())
    return 0


def _scratch(given: str | None) -> Path:
    """Return the folder to write to: the given one, or the one for temporary files."""
    from dltrain.protocol.errors import BadInputError

    try:
        folder = Path(given or tempfile.gettempdir())
    except FileNotFoundError as error:
        raise BadInputError("--scratch", str(error), "a folder to write to", "name one with --scratch") from None
    if not os.access(folder, os.W_OK):
        raise BadInputError("--scratch", f"{folder}, which cannot be written", "a writable folder", "name another one")
    return folder


def _peer(text: str) -> tuple[str, int]:
    from dltrain.protocol.errors import BadInputError

    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadInputError("--peer", repr(text), "HOST:PORT", "name the address at which a probe with --serve listens")
    return host.strip("[]"), int(port)


def _measured(
    device: str, scratch: Path, peer: tuple[str, int] | None, node_link: bool, count: int | None = None
) -> str:
    import torch

    from dlcontract.hardware import HardwareMeasure, StructuresOnRanks
    from dltrain.hardware_probe import background, disk, machine, memory, networks, structure_ranks, structures
    from dltrain.hardware_probe import node_link as within
    from dltrain.host import cgroup
    from dltrain.protocol.errors import BadInputError

    begin = time.monotonic()
    has_gpu = torch.cuda.is_available()
    if device == "gpu" and not has_gpu:
        raise BadInputError("--device", "gpu, but PyTorch sees no GPU", "a GPU", "choose cpu, or request a GPU")
    on_gpu = device == "gpu" or (device == "auto" and has_gpu)
    chip = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if count is not None and on_gpu:
        raise BadInputError("--structures", "a GPU", "a CPU", "choose --device cpu")
    facts, notes = machine.facts(), list[str | None]()
    cores = float(facts["cores"])
    _say(f"measuring {machine.gpu_name(chip) if on_gpu else machine.processor()}, {cores:g} cores")
    random_nets = None
    if count is not None:  # before anything computes with several threads, which do not survive a fork
        _say(f"training {count} random networks")
        random_nets, note = structures.measured(count, STRUCTURES_S)
        notes.append(note)
    others = background.Background()
    steps, crowded = networks.timed_steps(chip, cores, STEPS_S, None if on_gpu else others.sample)
    _say(f"timed {len(steps)} steps; measuring memory, disk and links")
    alone = crowded <= networks.CROWDED
    if not alone:
        what = f"other processes used them (steps took {crowded:.1f} times their CPU time)"
        notes.append(f"cores: {what}; several cores and the link between them were not measured")
    rates = memory.memory_rates(chip, cores if alone else 1.0, cgroup.free_nbytes())
    stored, note = disk.disk_rates(scratch)
    notes.append(note)
    near = far = None
    if node_link and alone:
        near, note = within.measure(scratch)
        notes.append(note)
    if peer is not None:
        far, note = _far(peer)
        notes.append(note)
    if random_nets is not None and count is not None:
        if not random_nets.watts:
            notes.append(structures.NO_POWER)
        several: tuple[StructuresOnRanks, ...] = ()
        note = "structures: other processes used the cores; not measured on several ranks"
        if alone:
            _say("training some of the random networks on several ranks")
            several, note = structure_ranks.measure(count, cores, scratch, SEVERAL_RANKS_S, cgroup.free_nbytes())
        random_nets = random_nets.model_copy(update={"several": several})
        notes.append(note)
    return HardwareMeasure(
        device=machine.gpu_name(chip) if on_gpu else machine.processor(),
        kind="gpu" if on_gpu else "cpu",
        **facts,
        driver=machine.driver() if on_gpu else "",
        steps=tuple(steps),
        structures=random_nets,
        memory=tuple(rates),
        disk=stored,
        near=near,
        far=far,
        crowded=crowded,
        background_cores=others.cores() if alone else None,
        took_s=round(time.monotonic() - begin, 2),
        notes=tuple(note for note in notes if note),
    ).to_json()


def _far(peer: tuple[str, int]) -> "tuple[LinkRate | None, str | None]":
    from dltrain.hardware_probe import link

    try:
        return link.measure(*peer), None
    except OSError as error:
        return None, f"link to {peer[0]}: {error.strerror or error}; not measured"


def _say(line: str) -> None:
    print(f"probe: {line}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())

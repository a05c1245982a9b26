"""Tests of what a pod that does not belong to the job can do at the job's ports. No NetworkPolicy is enforced here."""

import socket
import struct
from contextlib import suppress

import pytest

from support.trainer.pods import job
from support.trainer.ranks import BODIES

pytestmark = pytest.mark.mpi

PROBE = 2
NAME = "256sI"
HEADER = "=" + 2 * NAME + "IIIB32s3x"
"""The header of PRRTE 3's messages: origin, destination, tag, sequence number, length, type, route."""


def answer_to_probe(address: str, port: int) -> bytes:
    """Return what a port answers to PRRTE's question "who are you?", which is the first step to send it commands."""
    unknown = (b"foreign@0", 0)
    with suppress(OSError), socket.create_connection((address, port), timeout=1) as connection:
        connection.sendall(struct.pack(HEADER, *unknown, *unknown, 0, 0, 0, PROBE, b""))
        return connection.recv(4096)
    return b""


def test_no_port_of_a_job_takes_commands_from_a_foreign_pod() -> None:
    """PRRTE executes what any process that reaches its ports asks for. Only processes of the same pod may reach them."""
    with job(2) as two:
        two.start(
            two.plan(["python", str(BODIES / "faults/speaking_rank.py"), "4000", "mpi=1"]), DLTRAIN_IMPORT_AHEAD="off"
        )
        two.until(lambda report: report.step >= 1)
        for pod in two.pods:
            answers = {port: answer_to_probe(pod.address, port) for port in pod.listening()}
            assert answers, "the agent and the ranks listen"
            assert {port: answer for port, answer in answers.items() if b"prte" in answer} == {}

"""Tests of the agent protocol, with a real member and the test as its coordinator."""

import asyncio
import contextlib
import gzip
import os
import shutil
import ssl
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from dlcontract import Plan, RunPhase
from dltrain.agent.job import tls
from dltrain.protocol import agent_messages as proto
from support.trainer.pods import AGENT_PORT, TERM, WITHIN_S, Authority, Job, job

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for namespaces"),
]


@pytest.fixture
def member() -> Iterator[Job]:
    """Two pods, of which the second runs and waits for a coordinator, which the test provides."""
    with job(2) as made:
        made.pods[1].start(DLTRAIN_IMPORT_AHEAD="off")
        made.wait(lambda: "is up" in made.pods[1].text())
        yield made


class Dialogue:
    """The connections of a test to the member. They are closed at its end."""

    def __init__(self, made: Job) -> None:
        self.made = made
        self.writers: list[asyncio.StreamWriter] = []
        self.channels: list[proto.Channel] = []

    async def connect(self, context: ssl.SSLContext | None = None) -> proto.Channel:
        context = context or tls.load(self.made.authority.directory).client
        address = self.made.pods[1].address
        reader, writer = await asyncio.open_connection(address, AGENT_PORT, ssl=context, limit=proto.MAX_LINE)
        channel = proto.Channel(reader, writer)
        self.writers.append(writer)
        self.channels.append(channel)
        return channel

    async def connect_and_receive_welcome(self) -> tuple[proto.Channel, proto.Welcome]:
        channel = await self.connect()
        welcome = await channel.receive()
        assert isinstance(welcome, proto.Welcome) and welcome.pod == "test-cpu-1"
        return channel, welcome


def assign(plan: Plan, term: int, boot: str) -> proto.Assign:
    return proto.Assign(coordinator="test-cpu-0", boot=boot, term=term, digest=plan.digest(), plan=plan.to_json())


def launch(channel: proto.Channel, attempt: str) -> None:
    """Let the member start its ranks in ``attempt``."""
    channel.send(proto.Prepare(attempt=attempt))
    channel.send(proto.StartRanks(attempt=attempt))


def run(made: Job, body: Callable[[Dialogue], Awaitable[None]]) -> None:
    async def limited() -> None:
        dialogue = Dialogue(made)
        try:
            async with asyncio.timeout(WITHIN_S):
                await body(dialogue)
        finally:
            for channel in dialogue.channels:
                channel.close()
            for writer in dialogue.writers:
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    asyncio.run(limited())


def test_client_without_the_jobs_certificate_gets_no_answer(member: Job, tmp_path: Path) -> None:
    stranger = tls.load(Authority(tmp_path / "other").directory).client
    stranger.verify_mode = ssl.CERT_NONE  # The client accepts any member; the member must reject it.
    nobody = ssl.create_default_context()
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE

    async def body(dialogue: Dialogue) -> None:
        for context in (stranger, nobody):
            try:
                channel = await dialogue.connect(context)
            except ssl.SSLError:
                continue
            assert await channel.receive() is None, "with TLS 1.3, a rejected client learns that at its first read"

    run(member, body)


def test_member_rejects_coordinator_of_another_ca(member: Job, tmp_path: Path) -> None:
    """A coordinator with the CA of another job does not trust the member."""
    suspicious = tls.load(Authority(tmp_path / "other").directory).client

    async def body(dialogue: Dialogue) -> None:
        with pytest.raises(ssl.SSLCertVerificationError):
            await dialogue.connect(suspicious)

    run(member, body)


def test_member_obeys_the_highest_term(member: Job) -> None:
    plan = member.plan(["true"])

    async def body(dialogue: Dialogue) -> None:
        first, welcome = await dialogue.connect_and_receive_welcome()
        assert welcome.term == 0
        first.send(assign(plan, 5, "a"))
        assert await first.receive() == proto.Assigned(digest=plan.digest())

        for term, boot, why in ((4, "b", "found 4; expected at least 5"), (5, "b", "second coordinator in term 5")):
            other, welcome = await dialogue.connect_and_receive_welcome()
            assert (welcome.term, welcome.obeys) == (5, "a")
            other.send(assign(plan, term, boot))
            answer = await other.receive()
            assert isinstance(answer, proto.Refused) and why in answer.why
            assert await other.receive() is None, "the member closes the connection of a rejected coordinator"

        first.send(proto.Prepare(attempt="5.1"))
        assert await first.receive() == proto.Prepared(attempt="5.1"), "rejected coordinators change nothing"

        successor, _ = await dialogue.connect_and_receive_welcome()
        successor.send(assign(plan, 6, "b"))
        assert await successor.receive() == proto.Assigned(digest=plan.digest())
        assert await first.receive() is None, "the member closes the connection of the predecessor"

    run(member, body)


def test_superseded_coordinator_ends() -> None:
    with job(2) as made:
        plan = made.plan(["sleep", "1000"], model={"command": ["sleep", "1000"], "framework": "Torchrun"})
        made.start(plan, DLTRAIN_IMPORT_AHEAD="off")
        made.until(lambda r: r.phase is RunPhase.RUNNING)

        async def body(dialogue: Dialogue) -> None:
            channel, welcome = await dialogue.connect_and_receive_welcome()
            assert welcome.term == 1
            channel.send(assign(plan, 10, "x"))
            assert await asyncio.to_thread(made.pods[0].wait) == 1

        run(made, body)
        assert "superseded: pod test-cpu-1 follows another coordinator, of term 10" in made.pods[0].text()


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"uid": "another"}, "plan: found the job uid another"), ({}, "plan: found the digest")],
    ids=["another job", "wrong digest"],
)
def test_member_rejects_invalid_plans(member: Job, fields: dict[str, str], why: str) -> None:
    plan = member.plan(["true"], **fields)
    line = assign(plan, 50, "c")
    if not fields:
        line = line.model_copy(update={"digest": "0" * 12})

    async def body(dialogue: Dialogue) -> None:
        channel, _ = await dialogue.connect_and_receive_welcome()
        channel.send(line)
        answer = await channel.receive()
        assert isinstance(answer, proto.Refused) and why in answer.why

    run(member, body)


def test_member_sends_the_ends_of_its_ranks_again_to_each_coordinator(member: Job) -> None:
    """Messages that a coordinator never received must reach its successor, in a form that older coordinators know."""
    model = {"command": ["sh", "-c", "echo I was here; while true; do sleep 1; done"], "framework": "Torchrun"}
    plan = member.plan(["true"], model=model)
    pod = member.pods[1]

    async def body(dialogue: Dialogue) -> None:
        first, _ = await dialogue.connect_and_receive_welcome()
        first.send(assign(plan, 5, "a"))
        launch(first, "5.1")
        await asyncio.to_thread(member.wait, lambda: "I was here" in pod.text())
        first.close()

        ends = []
        for term, boot in ((5, "a"), (6, "b")):
            channel, _ = await dialogue.connect_and_receive_welcome()
            channel.send(assign(plan, term, boot))
            while not isinstance(line := await channel.receive(), proto.RankEnded):
                assert line is not None
            ends.append(line)
        assert ends[0] == ends[1]
        assert (ends[0].attempt, ends[0].rank, ends[0].signal) == ("5.1", 1, 9)
        assert "I was here" in ends[0].output

        launch(channel, "6.1")
        while not isinstance(await channel.receive(), proto.RankUp):
            pass
        last, _ = await dialogue.connect_and_receive_welcome()
        last.send(assign(plan, 7, "c"))
        last.send(proto.EndAttempt(attempt="7.1"))
        received = []
        while (line := await last.receive()) != proto.AttemptEnded(attempt="7.1"):
            received.append(line)
        ends = [line for line in received if isinstance(line, proto.RankEnded)]
        assert [end.attempt for end in ends] == ["6.1"], "the output of earlier attempts is obsolete"

    run(member, body)


@pytest.mark.parametrize(
    ("phase", "stores"),
    [
        (RunPhase.RESTARTING, True),
        (RunPhase.STOPPED, False),
        (RunPhase.FAILED, False),
        (RunPhase.SUCCEEDED, False),
    ],
)
def test_pod_stores_output_that_a_lost_coordinator_received_but_did_not_store(
    member: Job, phase: RunPhase, stores: bool
) -> None:
    """Between two attempts, a coordinator has the output of all ranks, and stores nothing."""
    model = {"command": ["sh", "-c", "echo I failed; exit 3"], "framework": "Torchrun"}
    plan = member.plan(["true"], model=model)
    pod = member.pods[1]

    async def body(dialogue: Dialogue) -> None:
        channel, _ = await dialogue.connect_and_receive_welcome()
        channel.send(assign(plan, 5, "a"))
        launch(channel, "5.1")
        while not isinstance(await channel.receive(), proto.RankEnded):
            pass
        channel.send(proto.PhaseNow(phase=phase))
        channel.send(proto.EndAttempt(attempt="5.1"))
        while await channel.receive() != proto.AttemptEnded(attempt="5.1"):
            pass

    run(member, body)
    member.wait(lambda: "the connection to the coordinator ended" in pod.text())
    pod.signal(TERM)
    pod.wait()
    file = member.report_file.with_suffix(".logs") / "rank-1.log.gz"
    assert file.exists() == stores
    assert not stores or "I failed" in gzip.decompress(file.read_bytes()).decode()


@pytest.mark.long
def test_ranks_end_when_the_coordinator_is_unreachable(member: Job) -> None:
    """Without a coordinator, nothing would detect the end of these ranks."""
    plan = member.plan(["sleep", "1000"], model={"command": ["sleep", "1000"], "framework": "Torchrun"})

    async def body(dialogue: Dialogue) -> None:
        channel, _ = await dialogue.connect_and_receive_welcome()
        channel.send(assign(plan, 60, "d"))
        launch(channel, "60.1")
        while not isinstance(await channel.receive(), proto.RankUp):
            pass
        pod = member.pods[1]
        assert any("sleep" in line for line in pod.command_lines())
        pod.link("down")
        await asyncio.to_thread(member.wait, lambda: not any("sleep" in line for line in pod.command_lines()))

    run(member, body)

"""Tests of the work queue in virtual time: merged duplicates, one worker per key, delays and back-off."""

import asyncio

from dljob.controller.work_queue import BACKOFF_FIRST_S, MAX_BACKOFF_S, URGENT_IN_A_ROW, WorkQueue
from support.virtual_time import now_s, run


async def take(queue: WorkQueue[str]) -> str:
    key = await queue.get()
    queue.done(key)
    return key


class TestOrder:
    def test_keys_are_first_in_first_out_and_unique(self) -> None:
        async def body() -> list[str]:
            queue = WorkQueue[str]()
            for key in ("a", "b", "a", "c", "b"):
                queue.add(key)
            return [await take(queue) for _ in range(len(queue))]

        assert run(body()) == ["a", "b", "c"]

    def test_urgent_keys_come_first_but_not_forever(self) -> None:
        async def body() -> list[str]:
            queue = WorkQueue[str](lambda key: key.startswith("run"))
            for i in range(10):
                queue.add(f"wait-{i}")
                queue.add(f"run-{i}")
            return [await take(queue) for _ in range(len(queue))]

        taken = run(body())
        first = URGENT_IN_A_ROW - 1
        assert taken[:first] == [f"run-{i}" for i in range(first)] and taken[first] == "wait-0"
        assert taken[first + 1 : 11] == ["run-7", "run-8", "run-9"] and len(set(taken)) == 20

    def test_key_added_while_busy_is_queued_again_afterwards(self) -> None:
        async def body() -> tuple[int, str, int]:
            queue = WorkQueue[str]()
            queue.add("a")
            key = await queue.get()
            queue.add("a")
            queue.add("a")
            during = len(queue)
            queue.done(key)
            return during, await take(queue), len(queue)

        assert run(body()) == (0, "a", 0)

    def test_workers_never_share_a_key(self) -> None:
        async def body() -> int:
            queue, busy, largest = WorkQueue[str](), set[str](), 0

            async def worker() -> None:
                nonlocal largest
                while True:
                    key = await queue.get()
                    assert key not in busy
                    busy.add(key)
                    largest = max(largest, len(busy))
                    await asyncio.sleep(0.3)
                    busy.discard(key)
                    queue.done(key)

            workers = [asyncio.create_task(worker()) for _ in range(4)]
            for i in range(100):
                queue.add(f"key-{i % 7}")
                await asyncio.sleep(0.05)
            for task in workers:
                task.cancel()
            return largest

        assert run(body()) == 4

    def test_waiting_worker_wakes_up(self) -> None:
        async def body() -> tuple[str, float]:
            queue = WorkQueue[str]()
            asyncio.get_running_loop().call_later(5, queue.add, "late")
            return await take(queue), now_s()

        assert run(body()) == ("late", 5)


class TestDelays:
    def test_the_earliest_time_wins(self) -> None:
        async def body() -> float:
            queue = WorkQueue[str]()
            for delay_s in (30, 10, 20):
                queue.add_after("a", delay_s)
            await take(queue)
            first = now_s()
            queue.add_after("b", 100)  # pending additions at 20 and 30 would come before
            assert await take(queue) == "b"
            return first

        assert run(body()) == 10

    def test_immediate_addition_cancels_the_delay(self) -> None:
        async def body() -> tuple[float, str]:
            queue = WorkQueue[str]()
            queue.add_after("a", 10)
            queue.add("a")
            await take(queue)
            first = now_s()
            queue.add_after("b", 60)
            return first, await take(queue)

        assert run(body()) == (0, "b")

    def test_forgotten_key_is_not_queued(self) -> None:
        async def body() -> str:
            queue = WorkQueue[str]()
            queue.add_after("gone", 1)
            queue.forget("gone")
            queue.add_after("here", 2)
            return await take(queue)

        assert run(body()) == "here"


class TestBackoff:
    def test_backoff_doubles_up_to_a_limit_and_resets_after_success(self) -> None:
        async def body() -> tuple[list[float], float]:
            queue = WorkQueue[str]()
            delays = []
            for _ in range(40):
                delays.append(queue.failed("a"))
                assert await take(queue) == "a"
            queue.succeeded("a")
            return delays, queue.failed("a")

        delays, after_success = run(body())
        assert delays[:3] == [BACKOFF_FIRST_S, 2 * BACKOFF_FIRST_S, 4 * BACKOFF_FIRST_S]
        assert delays == sorted(delays) and delays[-1] == MAX_BACKOFF_S
        assert after_success == BACKOFF_FIRST_S

    def test_failures_of_one_key_do_not_delay_others(self) -> None:
        async def body() -> float:
            queue = WorkQueue[str]()
            for _ in range(9):
                queue.failed("bad")
            return queue.failed("good")

        assert run(body()) == BACKOFF_FIRST_S


class TestPause:
    def test_paused_queue_keeps_nothing(self) -> None:
        """Fixed bug: in an operator that did not lead, the queue grew with each job that the watches reported."""

        async def body() -> list[str]:
            queue = WorkQueue[str]()
            queue.add("ready")
            queue.add_after("later", 1)
            queue.failed("failed")
            queue.pause()
            queue.add("new")
            queue.add_after("new later", 1)
            await asyncio.sleep(10)
            assert len(queue) == 0
            queue.resume(["a", "b"])
            await asyncio.sleep(10)
            found = [await take(queue) for _ in range(len(queue))]
            assert queue.failed("failed") == BACKOFF_FIRST_S
            return found

        assert run(body()) == ["a", "b"]

    def test_key_is_queued_again_unless_it_is_forgotten(self) -> None:
        """Its job may have been deleted during the pause, and the controller still keeps something for it."""

        async def body() -> list[str]:
            queue = WorkQueue[str]()
            for key in ("processed", "forgotten", "exists"):
                queue.add(key)
                await take(queue)
            queue.forget("forgotten")
            queue.pause()
            queue.resume(["exists"])
            return [await take(queue) for _ in range(len(queue))]

        assert run(body()) == ["exists", "processed"]


def test_other_tasks_run_between_keys_that_need_no_io() -> None:
    """Fixed bug: after a takeover, a worker processed the keys of all deleted jobs before any other task ran."""

    async def body() -> int:
        queue, rounds = WorkQueue[str](), 0

        async def other() -> None:
            nonlocal rounds
            while True:
                rounds += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for i in range(100):
            queue.add(str(i))
        for _ in range(100):
            await take(queue)
        task.cancel()
        return rounds

    assert run(body()) >= 99

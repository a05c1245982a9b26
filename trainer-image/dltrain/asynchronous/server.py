"""The parameter server applies updates on arrival and replies to a worker when the worker may start its next step."""

import time
from math import isfinite

import torch

from dltrain.asynchronous.link import Reply, ReplyKind, Request, RequestKind
from dltrain.asynchronous.run import Run
from dltrain.protocol.errors import DivergedError
from dltrain.timing.step_times import Times


class Server:
    """Apply the workers' updates on arrival, and delay replies to workers that are too far ahead of the slowest one."""

    def __init__(self, run: Run) -> None:
        self._run, self._trainer, self._clocks = run, run.trainer, run.clocks
        self._link, self._flat = run.link, run.flat
        self._samples = 0.0
        """Number of samples in all updates so far."""

    def serve(self) -> None:
        """Answer the workers' requests until all workers have done all of their steps. Pause for checkpoints.

        Raise PeerLostError if a rank is lost, DivergedError if a gradient is not finite, and SystemExit if a rank was
        asked to stop.
        """
        while not self._serve():
            self._run.pause()

    def _serve(self) -> bool:
        """Answer requests until all workers pause or all are done. Return True if all are done, False if they pause."""
        trainer, clocks, run = self._trainer, self._clocks, self._run
        waiting: dict[int, float] = {}
        """Workers that wait for a reply, each with the staleness of its last update."""
        pausing, paused = False, 0
        self._round_began, self._rounds = time.perf_counter(), min(clocks.done)
        while paused < len(run.ranks):
            peer, request = self._link.request()
            worker = run.ranks.index(peer)
            waiting[worker] = self._take(worker, request)
            pausing = pausing or bool(request.pause) or trainer.reporter.stop.is_set()
            if pausing:
                for one in waiting:
                    self._link.send(Reply(ReplyKind.PAUSE), run.ranks[one])
                paused, waiting = paused + len(waiting), {}
                continue
            if clocks.over and len(waiting) == len(run.ranks):
                for one in waiting:
                    self._answer(one, ReplyKind.OVER, waiting[one])
                return True
            for one in [one for one in waiting if clocks.may_begin(one)]:
                self._answer(one, ReplyKind.GO_ON, waiting.pop(one))
        return False

    def _take(self, worker: int, request: Request) -> float:
        """Process a worker's request. Return the staleness of the update that it contains.

        The staleness is the number of updates by other workers since this worker read the parameters. It is 0 if the
        request contains no update.
        """
        if request.kind == RequestKind.PARAMETERS:
            return 0.0
        if request.kind == RequestKind.NOTHING:
            self._clocks.step(worker, updates=False)
            self._tell()
            return 0.0
        self._flat.receive(self._link, self._run.ranks[worker], self._flat.buffer.flat)
        if not isfinite(float(torch.linalg.vector_norm(self._flat.buffer.flat))):
            rank, step = self._run.ranks[worker], self._clocks.done[worker]
            raise DivergedError(
                f"gradient of rank {rank}: found a value that is not finite at step {step}; expected finite values. "
                "Lower the learning rate"
            )
        for group in self._run.optimizer.param_groups:
            group["lr"] = request.rate
        self._run.optimizer.step()
        self._samples += request.samples
        staleness = self._clocks.step(worker)
        self._tell()
        return float(staleness)

    def _answer(self, worker: int, kind: ReplyKind, staleness: float) -> None:
        reply = Reply(kind, staleness, self._clocks.ahead(worker), self._samples)
        self._clocks.read(worker)
        self._link.send(reply, self._run.ranks[worker], self._flat.outgoing(self._flat.values))

    def _tell(self) -> None:
        """If the slowest worker has made another step, record this step, and send a progress update if one is due.

        The progress of the job is that of the slowest worker. The update goes to the agent.
        """
        slowest, trainer = min(self._clocks.done), self._trainer
        if slowest == self._rounds:
            return
        trainer.step, self._rounds = slowest, slowest
        now = time.perf_counter()
        trainer.progress.add(Times(0.0, now - self._round_began, 0.0), self._trainer.plan.global_batch, 0, [])
        self._round_began = now
        if trainer.progress.due(last=slowest == trainer.total_steps):
            lr = float(self._run.optimizer.param_groups[0]["lr"])
            trainer.progress.report_step(slowest, trainer.total_steps, trainer.epoch, lr, 0.0, 0, trainer.size)

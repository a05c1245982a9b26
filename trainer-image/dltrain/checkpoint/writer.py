"""Save and restore the training state during a run.

Data-parallel ranks have equal state, so only rank 0 writes it. Ranks with a part of the state each write their part to
a sharded checkpoint, in an object store or on a volume that all of them see. A thread (``background``) writes the
state: training pauses only while the state is copied in memory.
"""

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dlcontract import CheckpointMark, Plan
from dltrain.checkpoint import memory_copy
from dltrain.checkpoint.background import Writer
from dltrain.checkpoint.interval import Interval
from dltrain.checkpoint.memory_copy import NOTHING
from dltrain.checkpoint.state import PartTarget, Staging, Target, capture, load_together
from dltrain.checkpoint.store import Checkpoints, CheckpointStore, Extents, Snapshot, Stored, identity
from dltrain.comm.process_group import ProcessGroup
from dltrain.protocol.errors import BadInputError, CheckpointVolumeError
from dltrain.protocol.rank_messages import CheckpointSkipped
from dltrain.protocol.reporter import RankReporter
from dltrain.protocol.volume_layout import checkpoint_place, job_directory

if TYPE_CHECKING:
    from dltrain.checkpoint.sharded.checkpoints import ShardedCheckpoints
    from dltrain.checkpoint.sharded.remote import RemoteShardedCheckpoints

    Sharded = ShardedCheckpoints | RemoteShardedCheckpoints

SLOWEST_S, SLOWEST_BPS = 60.0, 10e6
"""The slowest supported volume: latency in seconds, and bytes per second."""


def patience_s(nbytes: int) -> float:
    """Return the maximum seconds for writing a checkpoint of ``nbytes`` bytes, after which the rank counts as hung."""
    return SLOWEST_S + nbytes / SLOWEST_BPS


def open_checkpoints(plan: Plan, identity: str) -> CheckpointStore:
    """Return the checkpoints of the plan's job, on its volume or in its object store, for the model ``identity``.

    The plan's term is stored there. Raise BadInputError if the place cannot be used, FencedError if it has a higher
    term, CheckpointError if it is full, and CheckpointVolumeError if it returns other errors, even after repetitions.
    """
    if plan.checkpoint.uri is None:
        return Checkpoints(job_directory(plan), identity, plan.checkpoint.keep, plan.term)
    from dltrain.checkpoint.remote_store import open_remote  # takes time, and only these jobs need it

    return open_remote(plan, identity)


class CheckpointManager:
    """The checkpoints of a run. Rank 0 reads and writes checkpoints; the other ranks receive the state.

    If checkpoints are sharded, every rank reads and writes its part.
    """

    def __init__(self, plan: Plan, process_group: ProcessGroup, reporter: RankReporter) -> None:
        self.plan, self.process_group, self.reporter = plan, process_group, reporter
        self._writer: Writer | None = None
        self._begun: int | None = None
        """Step of the newest checkpoint, which may not be complete yet."""
        self._exported = False
        """True if the newest checkpoint is sharded and also has the whole model in one file."""
        self.sharded = False
        """True if every rank writes its part of the state. Set by ``resume``."""
        self._saved_at = time.monotonic()
        self._identity = ""
        self._samples: int | None = None
        """Number of samples in the dataset of the training, which checkpoints contain; None before ``use_samples``."""
        self._resumed_samples: int | None = None
        """Number of samples in the checkpoint from which the training resumed, until ``use_samples`` compares it."""
        self._memory: Writer | None = None
        self.copied_anywhere = False
        """True if any rank can copy the state to the memory of its pod. Otherwise no copy is ever due."""
        self._pace = memory_copy.Pace()
        self._interval = Interval(plan)
        self._launched = time.monotonic()
        self._staging = Staging()
        self._short_of = (0.0, inf)
        """Seconds that ``fits`` has compared last: what a checkpoint needs, and what is left until a rank is killed."""
        self._export_fits = True
        """False if ``fits`` has found too little time to write the whole model after the parts of all ranks."""

    @property
    def last(self) -> CheckpointMark | None:
        return self._writer.last if self._writer else None

    @property
    def due(self) -> bool:
        """True if a checkpoint on the volume is due after this step. False on all ranks but rank 0."""
        if self._writer is None or self._writer.busy or (self.sharded and self.process_group.rank != 0):
            return False
        return time.monotonic() - self._saved_at >= self.interval_s

    @property
    def interval_s(self) -> float:
        """Seconds between checkpoints on the volume."""
        return self._interval.seconds(time.monotonic() - self._launched)

    def fits(self, left_s: float) -> bool:
        """Return True if a checkpoint that begins now is durable before the first rank is killed.

        ``left_s``: seconds until this rank is killed. All ranks must call this method, and get the same answer. It
        compares the time that rank 0 needs for a checkpoint, according to earlier checkpoints, with the smallest
        ``left_s`` of all ranks. Raise PeerLostError if a rank is lost.
        """
        rows = self.process_group.gather([left_s, self._writer.needed_s if self._writer is not None else 0.0])
        self._short_of = max(needed_s for _, needed_s in rows), min(left_s for left_s, _ in rows)
        # Rank 0 alone reads and writes the whole model, which takes at most as long as the parts of all ranks.
        self._export_fits = (1 + 2 * len(rows)) * self._short_of[0] <= self._short_of[1]
        return self._short_of[0] <= self._short_of[1]

    def report_skipped(self, step: int) -> None:
        """Report that the ranks stop after ``step`` steps without a checkpoint, because ``fits`` has returned False.

        On ranks other than 0, do nothing.
        """
        if self.process_group.rank != 0:
            return
        needed_s, left_s = self._short_of
        saved = (
            f"The last checkpoint is of step {self.last.step}" if self.last is not None else "There is no checkpoint"
        )
        copied = ". Pods that do not stop have a newer copy in memory" if self.copied_anywhere else ""
        print(  # noqa: T201
            f"dltrain: stopping after step {step} without a checkpoint, which takes {needed_s:.1f} s, because the "
            f"grace period ends in {left_s:.1f} s. {saved}{copied}. Raise "
            "spec.runPolicy.terminationGracePeriodSeconds",
            file=sys.stderr,
            flush=True,
        )
        self.reporter.send(CheckpointSkipped(rank=self.reporter.rank, step=step, needed_s=needed_s, left_s=left_s))

    def _add_cost(self, cost_s: float) -> float:
        self._interval.add_cost(cost_s)
        return self.interval_s

    @property
    def memory_due(self) -> bool:
        """True if a copy in the pods' memory is due after this step. False on all ranks but rank 0."""
        return self._writer is not None and self.copied_anywhere and self._pace.due

    @property
    def copies(self) -> bool:
        """True if this rank can copy the state to the memory of its pod. Ranks exchange this value in each step."""
        return self._memory is not None

    def resume(self, shapes: Mapping[str, Tensor], target: Target, parts: PartTarget | None = None) -> Snapshot | None:
        """Restore the newest state, from a pod's memory or the volume, on every rank.

        Return None if no state is saved or checkpoints are disabled.

        ``shapes``: the tensors of the whole model; only names, shapes and dtypes are used. One rank reads the state and
        broadcasts it, so that all ranks start from the same state. If checkpoints are sharded, all ranks verify their
        hashes together. Tensors of model and optimizer are passed to
        ``target`` one at a time and are not in the returned snapshot. ``parts``: the same model and
        optimizer if every rank has a part of them, so that checkpoints can be sharded. Raise BadInputError if the state
        does not fit this job, and CheckpointVolumeError if the volume cannot be read.
        """
        if not self.plan.checkpoint.enabled:
            return None
        self._identity = identity(self.plan.model.name or "script", shapes)
        self._memory = self._open_memory()
        stored = self._newest_in_memory()
        rows = self.process_group.gather([stored.step if stored is not None else NOTHING, float(self.copies)])
        steps, self.copied_anywhere = [row[0] for row in rows], any(row[1] for row in rows)
        holder, place = steps.index(max(steps)), None
        checkpoints, sharded = self._open_on_all(parts)
        wanted = checkpoints is not None and self._may_hold_newer(checkpoints, max(steps))
        if sharded is not None:
            found = sharded.load_verified(self.process_group, wanted=wanted)
        else:
            found = checkpoints.load() if checkpoints is not None and wanted else None
        if found is not None and found.step > max(steps):
            holder, stored, place = 0, found, found.place
        holder = int(self.process_group.broadcast(str(holder).encode()))
        mine = stored if holder == self.process_group.rank else None
        read = partial(sharded.read, target=parts) if sharded is not None and parts is not None else None
        snapshot = load_together(mine, self.process_group, holder, target, self._check, read)
        if self._writer is not None:
            self._writer.checkpoints.release()
        if snapshot is None:
            return None
        self._resumed_samples = snapshot.state.get("samples")  # a checkpoint of an older version lacks it
        if self.sharded:
            self._begun = snapshot.step
        if place is not None and stored is not None and self._writer is not None:
            self._writer.last = CheckpointMark(step=snapshot.step, unix_s=stored.unix_s, path=place)
            self._begun = snapshot.step
        if self.process_group.rank == 0:
            place = place or f"the memory of rank {holder}'s pod"
            print(f"dltrain: resumed from step {snapshot.step} in {place}", file=sys.stderr, flush=True)  # noqa: T201
            if self.reporter.resumed is not None:
                self.reporter.resumed()
        return snapshot

    def _newest_in_memory(self) -> Stored | None:
        """Return the copy in this pod's memory, or None if there is none or if it cannot be read."""
        try:
            return self._memory.checkpoints.load() if self._memory is not None else None
        except CheckpointVolumeError as error:
            self._warn(error)
            return None

    def _may_hold_newer(self, checkpoints: CheckpointStore, step: float) -> bool:
        """Return True if the volume or store has a checkpoint after ``step``, or if it cannot be read."""
        try:
            return max(checkpoints.steps(), default=NOTHING) > step
        except OSError:
            return True  # ``load`` repeats it

    def _open_memory(self) -> Writer | None:
        """Return the writer of this pod's copy; None if this rank writes no copy or has no directory for it."""
        if self.plan.splits_model or self.plan.shards_model:
            return None  # The ranks would have to gather the whole state every few seconds.
        try:
            place = memory_copy.directory(self.process_group)
            return Writer(Checkpoints(place, self._identity, keep=1), None) if place is not None else None
        except BadInputError as error:
            self._warn(error)
            return None

    def _open(self) -> CheckpointStore:
        checkpoints = open_checkpoints(self.plan, self._identity)
        self._writer = Writer(checkpoints, self.reporter, self._add_cost)
        return checkpoints

    def _open_on_all(self, parts: PartTarget | None) -> "tuple[CheckpointStore | None, Sharded | None]":
        """Return (the checkpoints on rank 0, None elsewhere; the sharded checkpoints, None if rank 0 writes all).

        All ranks must call it. ``parts``: the model and the optimizer if every rank has a part of them.
        """
        if parts is not None and self.plan.checkpoint.uri is not None:
            return self._open_remote(parts)
        checkpoints = self._open() if self.process_group.rank == 0 else None
        return checkpoints, self._open_sharded(parts) if parts is not None else None

    def _open_remote(self, parts: PartTarget) -> "tuple[CheckpointStore | None, Sharded]":
        """Let every rank upload its part of a checkpoint. All ranks must call it, and raise the same error.

        ``parts``: the model and the optimizer. Return (the checkpoints on rank 0, None elsewhere; this rank's part).
        """
        from dltrain.checkpoint.sharded.remote import open_together  # takes time

        checkpoints, sharded = open_together(self.plan, self._identity, self.process_group, parts)
        self._write_parts(sharded)
        return checkpoints, sharded

    def _write_parts(self, sharded: "Sharded") -> None:
        rank, self.sharded = self.process_group.rank, True
        on_cost = self._add_cost if rank == 0 else None
        self._writer = Writer(sharded, self.reporter, on_cost, reports=rank == 0)

    def _open_sharded(self, parts: PartTarget) -> "ShardedCheckpoints | None":
        """Let every rank write its part of a checkpoint, if all ranks see the volume. All ranks must call it.

        ``parts``: the model and the optimizer. If a rank does not see the volume, return None, and let rank 0 write
        whole checkpoints.
        """
        from dltrain.checkpoint.sharded.checkpoints import ShardedCheckpoints, shared_by_all  # takes time

        directory, rank = job_directory(self.plan), self.process_group.rank
        if not shared_by_all(directory, self.process_group):
            if rank == 0:
                print(  # noqa: T201
                    f"dltrain: {directory}: found ranks that do not see the files of rank 0; expected a volume that "
                    "all ranks share. Rank 0 gathers the whole state for each checkpoint",
                    file=sys.stderr,
                    flush=True,
                )
            return None
        own = self._writer.checkpoints if self._writer is not None else None
        checkpoints = ShardedCheckpoints(directory, own, parts.group())
        self._write_parts(checkpoints)
        return checkpoints

    def take_over(self) -> None:
        """Make this rank the writer of checkpoints if it has become rank 0 after a loss of ranks.

        A checkpoint is then due at once. Otherwise, do nothing.
        """
        if self.plan.checkpoint.enabled and self.process_group.rank == 0 and self._writer is None:
            self._open()
            self._saved_at = -inf

    def _check(self, state: dict[str, Any]) -> None:
        for key, field, here in (
            ("global_batch", "spec.globalBatchSize", self.plan.global_batch),
            ("seed", "spec.seed", self.plan.seed),
        ):
            if state[key] != here:
                expected = f"{state[key]}, as in the checkpoint in {checkpoint_place(self.plan)}"
                remedy = f"set {field} to its previous value, or use another checkpoint volume"
                raise BadInputError(field, str(here), expected, remedy)

    def use_samples(self, samples: int) -> None:
        """Store the number of samples in the dataset of the training. Call it before the first step.

        The place in the dataset after a step, and the epoch, follow from the number of the step and this number. Raise
        BadInputError if the checkpoint from which the training resumed is of another number of samples.
        """
        resumed, self._samples, self._resumed_samples = self._resumed_samples, samples, None
        if resumed not in (None, samples):
            expected = f"{resumed} samples, as in the checkpoint in {checkpoint_place(self.plan)}"
            remedy = "restore the former data, or use another checkpoint volume to train from the beginning"
            raise BadInputError("dataset", f"{samples} samples", expected, remedy)

    def save(
        self,
        step: int,
        model: Mapping[str, Tensor],
        optimizer: dict[str, Any],
        state: dict[str, Any],
        kept: Mapping[str, Tensor] | None = None,
        *,
        durable: bool = True,
        gathered_s: float = 0.0,
        copied: bool = False,
        extents: Extents | None = None,
        export: bool = False,
    ) -> None:
        """Start to save the state after ``step`` steps to the volume and to the pods' memory, in the background.

        All ranks must call this method. It does not write a checkpoint of the same step to the volume twice, and makes
        no copy in memory while the previous copy is in progress. ``kept``: tensors of the objects that the script has
        passed to ``t.keep``. ``durable``: False to copy the state to the pods' memory only. ``gathered_s``: seconds
        that were spent on comparing and gathering the state of all ranks. ``copied``: see ``capture``. ``extents``: the
        rows of each tensor that this rank has, if checkpoints are sharded. ``export``: True to also write the whole
        model to one file in this case, if there is time for it. Raise OSError if writing the previous checkpoint
        failed.
        """
        writers = []
        if durable:
            self._saved_at = time.monotonic()
            exports = export and self.sharded and self._export_fits
            fresh = step != self._begun or (exports and not self._exported)
            if self._writer is not None and fresh:
                self._begun, self._exported = step, exports
                writers.append(self._writer)
        if self._memory is not None and not self._memory.busy:
            writers.append(self._memory)
        began = time.monotonic()
        if writers:
            agreed = {"global_batch": self.plan.global_batch, "seed": self.plan.seed, "samples": self._samples}
            if self.sharded and self._writer is not None:
                self._writer.wait()  # ranks have the previous checkpoint complete at different times
                kept = kept if self.process_group.rank == 0 else None
            # A checkpoint that is still being written occupies the staging memory.
            free = not any(writer is not None and writer.busy for writer in (self._writer, self._memory))
            staging = self._staging if free else None
            snapshot = capture(step, model, optimizer, state | agreed, staging, kept, copied=copied)
            if self.sharded:
                snapshot = replace(snapshot, extents=extents or {}, export=exports)
            for writer in writers:
                self._begin(writer, snapshot, gathered_s + time.monotonic() - began)
        self._pace.copied(gathered_s + time.monotonic() - began)

    def _begin(self, writer: Writer, snapshot: Snapshot, stall_s: float) -> None:
        if writer is not self._memory:
            writer.begin(snapshot, stall_s)
            return
        try:
            gpus = self.process_group.local_size if self.plan.ranks[self.process_group.rank].gpu else 0
            if not memory_copy.room_for(Path(writer.checkpoints.place), snapshot, gpus):
                raise OSError(
                    f"{writer.checkpoints.place}: found too little free memory; expected room for two "
                    "copies of the training state"
                )
            writer.begin(snapshot)
        except OSError as error:
            self._memory = None
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        message = f"dltrain: cannot copy the state to memory ({error}), so restarts use the volume"
        print(message, file=sys.stderr, flush=True)  # noqa: T201

    def wait(self) -> None:
        """Wait until the last checkpoint is durable. Raise OSError if writing failed."""
        if self._writer is not None:
            self._writer.wait()
        if self._memory is not None:
            with suppress(OSError):  # The volume has the state.
                self._memory.wait()

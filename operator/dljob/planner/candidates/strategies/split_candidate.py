"""A candidate plan with model parallelism: its ranks, and the way in which they split the model."""

from dataclasses import dataclass, replace
from typing import Literal

from dljob.planner.candidates.evaluate import Part, describe
from dljob.planner.types import CollectiveName


@dataclass(frozen=True)
class SplitCandidate:
    """A candidate plan with model parallelism: a set of ranks (``part``), and the way in which they split the model.

    ``collective``: algorithm of the all-reduce between tensor-parallel ranks; not used by a pipeline.
    ``micro_batches``: number of micro-batches of each batch in a pipeline; 1 with tensor parallelism, unless it is a
    hybrid. ``replicas``: number of replicas of the model. ``anywhere``: True if the ranks of a replica need not be
    beside each other. The trainer runs only hybrids whose ranks are, and without micro-batches of Tensor.
    """

    part: Part
    strategy: Literal["Pipeline", "Tensor"]
    collective: CollectiveName
    micro_batches: int = 1
    replicas: int = 1
    anywhere: bool = False

    @property
    def split_over(self) -> int:
        """Return the number of ranks over which each replica of the model is split."""
        return self.part.ranks // self.replicas

    def divided(self, micro_batches: int) -> "SplitCandidate":
        """Return the candidate with another number of micro-batches."""
        return replace(self, micro_batches=micro_batches)

    def describe(self) -> str:
        """Return a text such as '3 x cpu, Pipeline of 3 stages, 12 micro-batches'."""
        if self.replicas > 1:
            how = "pipelines of {} stages" if self.strategy == "Pipeline" else "tensor-parallel groups of {} ranks"
            accumulated = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
            reducing = "" if self.anywhere else f", {self.collective}"
            return f"{describe([self.part])}, {self.replicas} {how.format(self.split_over)}{accumulated}{reducing}"
        if self.strategy == "Tensor":
            return f"{describe([self.part])}, Tensor, {self.collective}"
        return f"{describe([self.part])}, Pipeline of {self.part.ranks} stages, {self.micro_batches} micro-batches"

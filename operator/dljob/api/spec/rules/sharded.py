"""Rules of a DLJobSpec about ``parallelism.strategy`` Sharded."""

from dljob.api.base import Rule
from dljob.api.compatibility import COMPATIBLE, chosen

_SHARDED = chosen("strategy", "Sharded")
# Begins with the new value, so that the API policy sees that every stored object fulfils it.
_COLLECTIVE = _SHARDED.implies(chosen("collective", *COMPATIBLE["Sharded"]["collective"]))

SHARDED_RULES = (
    Rule(
        "parallelism.strategy",
        f"!({_SHARDED.cel}) || has(self.trainer) && has(self.trainer.command) && size(self.trainer.command) > 0",
        "parallelism.strategy Sharded supports training scripts only: set trainer.command, or choose another strategy",
        lambda s: not _SHARDED.holds(s) or bool(s.trainer.command),
    ),
    Rule(
        "collective",
        _COLLECTIVE.cel,
        "parallelism.strategy Sharded needs collective Torch: remove collective, or set collective to Torch",
        _COLLECTIVE.holds,
    ),
    Rule(
        "planning.groups",
        f"!({_SHARDED.cel}) || !has(self.planning) || !has(self.planning.groups) || "
        "(size(self.planning.groups) <= 1 && self.planning.groups.all(g, !has(g.batchPerRank)))",
        "parallelism.strategy Sharded needs one device type, and ranks divide the batch equally: set one group without "
        "batchPerRank",
        lambda s: (
            not _SHARDED.holds(s)
            or (len(s.planning.groups) <= 1 and all(g.batch_per_rank is None for g in s.planning.groups))
        ),
    ),
)

"""The storage of a job: the space for fetched data on each node, and the nodes that can mount its volumes."""

from dataclasses import dataclass

from dljob.cluster.node_selector import NodeSelector

FILLED = 0.9
"""Maximum fraction of the space that a plan fills with shards of training samples. The rest is for held-out samples,
and for the blocks of the file at the ends of shards."""
UNLIMITED = 2**62


@dataclass(frozen=True)
class Storage:
    """Data that is fetched to nodes.

    ``node_nbytes``: space that each pod requests on its node. ``data_nbytes``: size of all training samples; None if
    the spec does not give it. ``sharded``: True if a node has only the samples that its ranks compute. ``divisible``:
    True if the file could be sharded.
    """

    node_nbytes: int
    data_nbytes: int | None
    sharded: bool = False
    divisible: bool = False

    @property
    def shard_room_nbytes(self) -> float:
        """Return the bytes on each node that shards may fill: ``node_nbytes`` less a reserve (``FILLED``)."""
        return FILLED * self.node_nbytes

    def largest_share(self, batch: int, ranks_per_node: int) -> int:
        """Return the largest local batch size of a rank, so that the shards of its node fit.

        The shards of a rank with a local batch of b samples are b / ``batch`` of the data.
        """
        if not self.sharded or not self.data_nbytes:
            return UNLIMITED
        return int(self.shard_room_nbytes * batch / (self.data_nbytes * ranks_per_node))


@dataclass(frozen=True)
class VolumeLimit:
    """A PersistentVolumeClaim that all pods of a job mount, and the nodes on which its volume can be mounted.

    ``field``: field of the spec because of which they mount it, such as 'spec.dataset.uri'. ``source``: what limits the
    nodes, such as "volume 'pv-1'", or for a claim that has no volume yet, "StorageClass 'zonal'".
    """

    field: str
    claim: str
    source: str
    nodes: NodeSelector

    @property
    def subject(self) -> str:
        """Return what limits the nodes, such as "volume 'pv-1' of claim 'data'"."""
        return f"{self.source} of claim {self.claim!r}"

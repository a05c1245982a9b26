"""The free resources of nodes in the simulation of the queue."""

from collections.abc import Container, Iterable
from dataclasses import dataclass

from dljob.cluster import ClusterView
from dljob.scheduling.reservations import Reservation, size


@dataclass(frozen=True, slots=True)
class Use:
    """Resources that a pod takes from one node. ``cpu``: in cores."""

    node: str
    devices: int
    cpu: float
    memory_nbytes: int


_State = tuple[int, int, int]
"""What a node has left: free devices (0 without GPUs), free thousandths of a core, and free bytes of memory."""


class FreeNodes:
    """The free resources of nodes, indexed by the number of free devices, or of free cores for nodes without GPUs.

    Most nodes of a busy cluster are full. With the index, a search usually skips them without checking each of them.
    """

    def __init__(self, view: ClusterView) -> None:
        self._at: dict[str, tuple[str, bool, _State]] = {}
        self._nodes = {node.name: node for node in view.nodes}
        self._levels: dict[str, dict[int, dict[str, None]]] = {}
        """Names of nodes, by device type and level (``_level``). The innermost dictionaries are ordered sets."""
        for node in view.nodes:
            state = node.free_devices if node.is_gpu else 0, round(node.free_cpu * 1000), node.free_memory_nbytes
            self._put(node.name, node.device, node.is_gpu, state)

    def copy(self) -> "FreeNodes":
        other = FreeNodes(ClusterView())
        other._at, other._nodes = dict(self._at), self._nodes
        other._levels = {
            device: {level: dict(names) for level, names in levels.items()} for device, levels in self._levels.items()
        }
        return other

    def take(
        self, needs: Iterable[Reservation], later: "FreeNodes | None" = None, *, latest_first: bool = False
    ) -> tuple[Use, ...] | None:
        """Take what pods of one job need, each on a node of its own. Return what was taken, node by node.

        The groups with the most devices come first, on nodes with the most free ones. If not all pods fit, take
        nothing and return None. ``later``: what is free on the same nodes at a later time, at which the pods still run.
        They must fit then, too, and their resources are also taken from it. ``latest_first``: of nodes with equally
        many free devices, take those first that changed last.
        """
        taken: list[Use] = []
        for need in sorted(needs, key=size, reverse=True):
            names = self._room_for(need, later, latest_first, {use.node for use in taken})
            if names is None:
                self.give(taken)
                if later is not None:
                    later.give(taken)
                return None
            for use in (Use(name, need.devices, need.cpu, need.memory_nbytes) for name in names):
                for nodes in (self,) if later is None else (self, later):
                    nodes._change(use, -1)
                taken.append(use)
        return tuple(taken)

    def give(self, uses: Iterable[Use]) -> None:
        """Make resources free again that ``take`` returned. Uses of nodes that do not exist are ignored."""
        for use in uses:
            self._change(use, 1)

    def _room_for(
        self, need: Reservation, later: "FreeNodes | None", latest_first: bool, without: Container[str]
    ) -> list[str] | None:
        """Return the names of ``need.nodes`` nodes with room for one pod each; None if there are fewer such nodes.

        ``without``: names of nodes with other pods of the job.
        """
        levels = self._levels.get(need.device, {})
        if not levels:
            return None if need.nodes else []
        is_gpu = self._at[next(iter(next(iter(levels.values()))))][1]
        state = need.devices if is_gpu else 0, round(need.cpu * 1000), need.memory_nbytes
        enough = sorted((level for level in levels if level >= _level(is_gpu, state)), reverse=True)
        if sum(len(levels[level]) for level in enough) < need.nodes:
            return None
        found: list[str] = []
        for level in enough:
            for name in reversed(levels[level]) if latest_first else levels[level]:
                if len(found) == need.nodes:
                    return found
                fits = _fits(state, self._at[name][2])
                if fits and later is not None:
                    fits = name in later._at and _fits(state, later._at[name][2])
                if fits and name not in without and need.allows(self._nodes[name]):
                    found.append(name)
        return found if len(found) == need.nodes else None

    def _change(self, use: Use, sign: int) -> None:
        if use.node not in self._at:
            return
        device, is_gpu, (devices, cpu_m, nbytes) = self._at[use.node]
        level = _level(is_gpu, (devices, cpu_m, nbytes))
        names = self._levels[device][level]
        del names[use.node]
        if not names:
            del self._levels[device][level]
        devices += sign * use.devices if is_gpu else 0
        state = devices, cpu_m + sign * round(use.cpu * 1000), nbytes + sign * use.memory_nbytes
        self._put(use.node, device, is_gpu, state)

    def _put(self, name: str, device: str, is_gpu: bool, state: _State) -> None:
        self._at[name] = device, is_gpu, state
        self._levels.setdefault(device, {}).setdefault(_level(is_gpu, state), {})[name] = None


def _fits(needed: _State, free: _State) -> bool:
    return all(f >= n for f, n in zip(free, needed, strict=True))


def _level(is_gpu: bool, state: _State) -> int:
    return state[0] if is_gpu else state[1] // 1000

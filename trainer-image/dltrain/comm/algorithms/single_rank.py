"""The collective of a single rank, which needs no communication."""

import torch

from dltrain.comm.core.collective import Collective


class _Done:
    def test(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class SingleRank(Collective):
    name = "SingleRank"

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self.rank, self.size, self.buffers = 0, 1, buffers
        self._done = _Done()

    def start(self, index: int) -> _Done:
        return self._done

    def close(self) -> None:
        return None

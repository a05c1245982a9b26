"""Read the tensors of a sharded checkpoint from its parts (``dlcontract.checkpoint.parts``)."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dlcontract.checkpoint.parts import ShardedTensor
from dltrain.checkpoint.tensor_file import DTYPES, TensorFile


class PartsFile:
    """The tensors of the parts of one file, read as whole tensors, one at a time, as from a ``TensorFile``.

    ``entries``: name → (dtype, shape) of each tensor. This class does not check the content, so the caller must verify
    the hashes of the parts before. Raise OSError if a part cannot be read.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, ShardedTensor]) -> None:
        self.folder, self.tensors = folder, tensors
        self.entries = {name: (DTYPES[tensor.dtype], tensor.shape) for name, tensor in tensors.items()}
        self._files: dict[str, TensorFile] = {}

    def read(self, name: str) -> Tensor:
        """Return a tensor in new main memory. Raise OSError if it cannot be read, even after retries."""
        dtype, shape = self.entries[name]
        whole = torch.empty(shape, dtype=dtype, device="cpu")
        for chunk in self.tensors[name].chunks if whole.numel() else ():
            rows = whole.narrow(0, chunk.begin, chunk.rows) if whole.dim() else whole
            self.read_rows(rows, chunk.file, name)
        return whole

    def read_rows(self, target: Tensor, file: str, name: str, first: int = 0) -> None:
        """Read rows of a tensor from the part ``file`` into ``target``, which is contiguous and in main memory.

        ``first``: the first of the rows, counted from the first row of the part. Raise OSError.
        """
        if (found := self._files.get(file)) is None:
            found = self._files[file] = TensorFile(self.folder / file)
        found.read_rows(target, name, first)

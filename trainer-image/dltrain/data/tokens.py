"""Datasets of tokens: a long text that is split into sequences."""

import sysconfig
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dltrain.host.volume_access import is_transient, retry
from dltrain.models import InputShape
from dltrain.protocol.errors import BadInputError, VolumeError

POSITIONS = 128
"""Number of tokens in a sequence."""
KINDS = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32))
SOURCE_SEQUENCES = 11_000
SOURCE_TEST_SEQUENCES = 1_000


class TokenText:
    """A dataset of the sequences of one text. The last ``test_samples`` sequences are held out.

    A sequence has 128 positions. The inputs of sequence i are the tokens 128 i to 128 i + 127 of the text. The targets
    are the tokens 128 i + 1 to 128 i + 128, so that the target of a position is the next token.
    """

    def __init__(self, tokens: NDArray[np.unsignedinteger], vocabulary: int, test_samples: int) -> None:
        """Split the one-dimensional array ``tokens`` into sequences. ``vocabulary``: number of possible tokens.

        If ``tokens`` is memory-mapped from a file, the ranks of a node share the memory. ``test_samples``: number of
        sequences at the end that are held out.
        """
        self._tokens = tokens
        self.test_samples = test_samples
        self.labels: tuple[str, ...] = ()
        self.scale: float | None = None
        self.train_samples = (len(tokens) - 1) // POSITIONS - test_samples
        self.shape = InputShape((POSITIONS,), vocabulary, tokens=True)

    def train(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        rows = self._tokens[indices[:, None] * POSITIONS + np.arange(POSITIONS + 1)].astype(np.int64)
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())

    def test(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        return self.train(indices + self.train_samples)


def read_tokens(path: Path) -> TokenText:
    """Read a file of tokens. The last tenth of the sequences is held out.

    The file is a one-dimensional .npy of uint8, uint16 or uint32, or a .bin of little-endian uint16 (if the name
    ends in ``.uint32.bin``: uint32). Raise BadInputError for another format or a text that is too short, and
    VolumeError if the file cannot be read, even after repetitions.
    """
    expected = f"a one-dimensional .npy of uint8, uint16 or uint32, or a .bin of uint16, of over {2 * POSITIONS} tokens"

    def read() -> NDArray[Any]:
        if path.suffix == ".npy":
            return cast(NDArray[Any], np.load(path, mmap_mode="r", allow_pickle=False))
        kind = np.dtype("<u4") if path.name.endswith(".uint32.bin") else np.dtype("<u2")
        return np.memmap(path, dtype=kind, mode="r")

    try:
        tokens = retry(read, str(path))
    except FileNotFoundError:
        found = f"no file {path}"
        raise BadInputError("spec.dataset.uri", found, expected, "correct the path, or put the file there") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and is_transient(error):
            raise VolumeError("spec.dataset.uri", path, error) from None
        raise BadInputError("spec.dataset.uri", f"{path}: {error}", expected, "correct the file") from None
    if tokens.ndim != 1 or tokens.dtype not in KINDS or len(tokens) <= 2 * POSITIONS:
        found = f"{path} with {tokens.dtype} of shape {tokens.shape}"
        raise BadInputError("spec.dataset.uri", found, expected, "correct the file")
    sequences = (len(tokens) - 1) // POSITIONS
    return TokenText(tokens, int(tokens.max()) + 1, max(1, sequences // 10))


def python_source() -> TokenText:
    """Return the source code of Python's standard library as a dataset of tokens, in which each byte is a token.

    Every Python installation contains this text under its own licence, so dltrain need not include it. The text differs
    slightly between versions of Python. Raise BadInputError if the text is too short.
    """
    folder, wanted = Path(sysconfig.get_path("stdlib")), SOURCE_SEQUENCES * POSITIONS + 1
    text = b""
    for path in sorted(folder.glob("*.py")):
        if len(text) < wanted:
            text += path.read_bytes()
    if len(text) < wanted:
        found = f"{len(text)} bytes of modules in {folder}"
        raise BadInputError("spec.dataset.name", found, f"{wanted}", "use an image with Python's standard library")
    return TokenText(np.frombuffer(text[:wanted], np.uint8), 256, SOURCE_TEST_SEQUENCES)

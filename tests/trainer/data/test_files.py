"""Tests of reading ``.npz`` files: kinds of arrays that are converted."""

from pathlib import Path

import numpy as np

import dltrain


def test_arrays_in_the_other_byte_order_and_names_in_bytes_are_converted(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    x, y = np.arange(8, dtype=">f4").reshape(4, 2), np.array([0, 1, 0, 1], ">i8")
    labels = np.array([b"cat", "dög".encode()])
    np.savez(path, x=x, y=y, x_test=x, y_test=y, labels=labels, scale=np.array([0.5]))
    found = dltrain.data.load(str(path))
    assert found.train(np.arange(4))[0].tolist() == x.tolist() and found.test(np.array([1]))[1].tolist() == [1]
    assert found.labels == ("cat", "dög") and found.scale is None, "floats are not scaled"

"""Write trainer-image/dltrain/data/*.npz from the datasets in scikit-learn: ``hack/make_datasets.py [--check]``.

A fixed fifth of each dataset is held out. Tables are standardized with the mean and the standard deviation of their
training part. The images of digits are stored as integers from 0 to 16, together with the factor that scales them. With
``--check``, the command writes nothing and fails if the files differ from what it would write.
"""

import sys
from pathlib import Path

import numpy as np
from sklearn import datasets

FOLDER = Path(__file__).resolve().parent.parent / "trainer-image" / "dltrain" / "data"


def split(x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """Split samples into a training part of four fifths and a test part of one fifth, by a fixed permutation.

    Return the arrays with the keys x, y, x_test and y_test.
    """
    order = np.argsort(np.random.Philox(key=2026).random_raw(len(x)), kind="stable")
    cut = len(x) - -(-len(x) // 5)
    train, test = order[:cut], order[cut:]
    return {"x": x[train], "y": y[train].astype(np.uint8), "x_test": x[test], "y_test": y[test].astype(np.uint8)}


def table(name: str) -> dict[str, np.ndarray]:
    bunch = getattr(datasets, f"load_{name}")()
    parts = split(bunch.data, bunch.target)
    mean, deviation = parts["x"].mean(axis=0), parts["x"].std(axis=0)
    for key in ("x", "x_test"):
        parts[key] = ((parts[key] - mean) / deviation).astype(np.float32)
    return parts


def digits() -> dict[str, np.ndarray]:
    bunch = datasets.load_digits()
    parts = split(bunch.data.astype(np.uint8).reshape(-1, 1, 8, 8), bunch.target)
    return parts | {"scale": np.array(1 / 16, dtype=np.float32)}


def main() -> int:
    made = {"digits": digits(), "breast-cancer": table("breast_cancer"), "wine": table("wine"), "iris": table("iris")}
    stale = []
    for name, parts in made.items():
        path = FOLDER / f"{name}.npz"
        if "--check" not in sys.argv[1:]:
            np.savez_compressed(path, allow_pickle=False, **parts)
            print(f"{path.name}: {path.stat().st_size} bytes")
        elif not path.exists() or not all(np.array_equal(np.load(path)[key], part) for key, part in parts.items()):
            stale.append(path.name)
    if stale:
        print(f"stale: {', '.join(stale)}; run hack/make_datasets.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())

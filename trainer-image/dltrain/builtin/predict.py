"""Use the built-in model in this folder. A copy of this script lies beside each trained model; change it as you like.

    python predict.py inputs.npy                 classes of the samples in an array (.npz: of x_test, or of x)
    python predict.py image.png                  class of an image (needs Pillow)
    python predict.py --text "def main("         text that a language model of bytes appends
    python predict.py --export                   write model.pt2, which needs neither dltrain nor this script

It needs PyTorch and numpy, and without model.pt2 also safetensors and dltrain. ``model.json`` has the shape of a
sample, the names of the classes, and the factor that scales inputs of whole numbers.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
EXPORTED = "model.pt2"


def about(folder: Path = HERE) -> dict[str, Any]:
    """Return the content of ``model.json``."""
    found: dict[str, Any] = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    return found


def weights(folder: Path = HERE) -> Path:
    """Return the file with the weights: ``model.safetensors`` in this folder, or in its newest checkpoint."""
    found = [folder / "model.safetensors", *sorted(folder.glob("step-*/model.safetensors"), reverse=True)]
    if (path := next((path for path in found if path.is_file()), None)) is None:
        raise SystemExit(f"{folder}: found no model.safetensors; expected one here or in step-*. Copy it here")
    return path


def load(folder: Path = HERE) -> Any:
    """Return the trained model, a function from a batch of inputs to logits."""
    if (folder / EXPORTED).is_file():
        return torch.export.load(folder / EXPORTED).module()
    try:
        from safetensors.torch import load_file

        from dltrain.models import InputShape, build
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"predict.py: found no package {error.name}; expected dltrain and safetensors, or the file {EXPORTED}. "
            "Install them, or run predict.py --export where they are installed and copy that file here"
        ) from None
    model_json = about(folder)
    shape = InputShape(tuple(model_json["shape"]), model_json["classes"], model_json["tokens"])
    model = build(model_json["model"], shape)
    model.load_state_dict(load_file(weights(folder)))
    return model.eval()


def prepared(inputs: Any, model_json: dict[str, Any]) -> torch.Tensor:
    """Return ``inputs`` as a batch with the shape, type and scale of the training. Raise SystemExit for another shape.

    ``model_json``: content of model.json.
    """
    array, shape = np.asarray(inputs), tuple(model_json["shape"])
    if array.shape == shape:
        array = array[None]
    if array.shape[1:] != shape:
        raise SystemExit(
            f"inputs: found samples of shape {array.shape[1:]}; expected {shape}, as in the training. Reshape them"
        )
    if model_json["tokens"]:
        return torch.from_numpy(array.astype(np.int64))
    scale = model_json["scale"] if array.dtype == np.uint8 else None
    return torch.from_numpy(array.astype(np.float32) * np.float32(1 if scale is None else scale))


@torch.no_grad()
def predict(inputs: Any, folder: Path = HERE) -> list[tuple[str, float]]:
    """Return (class, probability) of each sample in ``inputs``, an array of shape (n, …) or of one sample."""
    model_json = about(folder)
    probabilities = load(folder)(prepared(inputs, model_json)).float().softmax(-1)
    best, classes = probabilities.max(-1), model_json["labels"]
    return [
        (classes[number] if number < len(classes) else str(number), probability)
        for number, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


@torch.no_grad()
def write_text(start: str, count: int = 200, folder: Path = HERE, seed: int = 0) -> str:
    """Return ``start`` and ``count`` further bytes that the language model draws by its probabilities."""
    model, length = load(folder), about(folder)["shape"][0]
    generator = torch.Generator().manual_seed(seed)
    tokens = list(start.encode()) or [10]
    for _ in range(count):
        window = tokens[-length:]
        padded = torch.tensor([window + [0] * (length - len(window))])
        logits = model(padded)[0, len(window) - 1].float()
        tokens.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    return bytes(token % 256 for token in tokens).decode(errors="replace")


def export(folder: Path = HERE) -> Path:
    """Write ``model.pt2``, which ``torch.export.load`` reads without the model's code. Return its path."""
    model_json = about(folder)
    kind = np.uint8 if model_json["tokens"] else np.float32
    example = prepared(np.zeros((2, *model_json["shape"]), kind), model_json)
    batch = {0: torch.export.Dim("batch", min=1, max=4096)}
    path = folder / EXPORTED
    path.unlink(missing_ok=True)
    torch.export.save(torch.export.export(load(folder), (example,), dynamic_shapes=(batch,)), path)
    return path


def read_inputs(path: Path, model_json: dict[str, Any]) -> Any:
    """Return the samples in a file: an array, or one image, which is scaled to the size of the model's inputs."""
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False)
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return arrays["x_test" if "x_test" in arrays.files else "x"]
    if len(model_json["shape"]) != 3:
        raise SystemExit(
            f"inputs: found {path}; expected .npy or .npz with samples of shape {model_json['shape']}. Convert the file"
        )
    from PIL import Image

    channels, height, width = model_json["shape"]
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("L" if channels == 1 else "RGB").resize((width, height)), np.float32)
    return pixels.reshape(height, width, channels).transpose(2, 0, 1) / 255


def main() -> None:
    parser = argparse.ArgumentParser(description="Use the trained model in this folder.")
    parser.add_argument("inputs", nargs="*", type=Path, help=".npy, .npz or an image")
    parser.add_argument("--text", help="text that a language model of bytes continues")
    parser.add_argument("--export", action="store_true", help=f"write {EXPORTED}")
    given = parser.parse_args()
    out = sys.stdout.write
    if given.export:
        out(f"{export()}\n")
    if given.text is not None:
        if not about()["tokens"] or about()["classes"] != 256:
            parser.error("--text: found a model of other inputs; expected a language model of bytes. Pass a file")
        out(write_text(given.text) + "\n")
    for path in given.inputs:
        for number, (name, probability) in enumerate(predict(read_inputs(path, about()))):
            out(f"{path}\t{number}\t{name}\t{probability:.4f}\n")
    if not (given.export or given.text is not None or given.inputs):
        parser.error("inputs: found nothing; expected a file, --text or --export")


if __name__ == "__main__":
    main()

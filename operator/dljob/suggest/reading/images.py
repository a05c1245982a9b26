"""Read images from a folder with a subfolder for each class, or from arrays, into one array of equal size."""

import io
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dljob.suggest.errors import DataError
from dljob.suggest.wording import counted

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
PARTS = (("train", "training"), ("test", "val", "valid", "validation"))
"""Names of folders that hold the training part and the test part."""
MIN_SIDE, MAX_SIDE = 8, 64
"""Images are scaled to a side between these, in pixels: the median of the folder, if it lies between them."""
COPY, ARRAYS, FOLDER, ARCHIVE = "copy", "arrays", "folder", "archive"
"""Forms of images: the scaled copy of a project, an .npz file of the user, a folder, and archives."""
MAX_NBYTES = 2**30
MAX_ARRAYS_NBYTES = 8 * MAX_NBYTES
"""Largest .npz file that is read into memory, unpacked: MAX_NBYTES pixels of type float64."""
MIN_IMAGES = 10


@dataclass(frozen=True)
class ImageFile:
    """An image. ``content``: the path of its file, or its bytes if it is in an archive."""

    name: str
    content: Path | bytes

    def opened(self) -> Any:
        """Return the path or the file object from which Pillow opens the image."""
        return io.BytesIO(self.content) if isinstance(self.content, bytes) else self.content


@dataclass(frozen=True)
class Images:
    """Images of equal size: ``x`` of shape (n, height, width, channels) and type uint8, ``y`` their class numbers."""

    path: Path
    x: NDArray[np.uint8]
    y: NDArray[np.int64]
    classes: tuple[str, ...]
    x_test: NDArray[np.uint8] | None = None
    y_test: NDArray[np.int64] | None = None
    notes: tuple[str, ...] = ()
    form: str = ARRAYS
    parts: tuple[str, ...] = ()
    """Names of the folders of the training part and the test part in ``path``; empty without them."""
    grey_bits: int = 16
    """Bits of the grey values in images of more than 8 bits, of which the upper 8 are read."""
    held_nbytes: int = 0
    """Bytes of the files of archives that are in memory together while their images are decoded."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return name → array of the file from which the project reads the images."""
        found: dict[str, NDArray[Any]] = {"x": self.x, "y": self.y, "classes": np.array(self.classes)}
        if self.x_test is not None and self.y_test is not None:
            found |= {"x_test": self.x_test, "y_test": self.y_test}
        return found


def read_folder(path: Path, side: int | None = None) -> Images:
    """Return the images in ``path/CLASS/*`` or, with a separate test part, in ``path/train/CLASS/*`` and ``path/test``.

    ``side``: height and width in pixels to which all images are scaled; None: by their median size. Raise DataError for
    a folder without classes, or for the first image that cannot be decoded.
    """
    folders = {child.name.lower(): child for child in path.iterdir() if child.is_dir()}
    train, tests = ([folders[name] for name in names if name in folders] for names in PARTS)
    parts: tuple[Path, ...] = ()
    if train and tests and any(child.is_dir() for child in train[0].iterdir()):
        parts = (train[0], *[folder for folder in tests if _files(folder)][:1])
    files, test_files = _files(parts[0] if parts else path), _files(parts[1]) if len(parts) > 1 else {}
    if len(files) < 2:
        inner = [path / name for name in files if len(_files(path / name)) > 1]
        remedy = f"Pass {inner[0]}, which has such folders." if inner else "Sort the images into folders."
        raise DataError(
            f"{path}: found {counted(len(files), 'folder', 'folders')} with images; expected a folder for each of at "
            f"least two classes, such as {path}/cat and {path}/dog. {remedy}"
        )
    if unknown := sorted(set(test_files) - set(files)):
        raise DataError(
            f"{parts[1]}: found the class {unknown[0]!r}; expected the classes of {parts[0]}. Rename the folder."
        )
    found = decoded_images(path, files, test_files, side)
    unread = [folder for folder in tests if parts and folder not in parts]
    notes = (*found.notes, *_left_out(parts or (path,), unread))
    return replace(found, form=FOLDER, parts=tuple(part.name for part in parts), notes=notes)


def _left_out(parts: Sequence[Path], unread: Sequence[Path]) -> list[str]:
    """Return findings about files that are not read.

    ``parts``: the folders of the training part and the test part. ``unread``: other folders with the name of a part.
    """
    found = []
    for folder in unread:
        images = sum(file.suffix.lower() in SUFFIXES for file in _visible(folder))
        why = f"{parts[-1].name} is the test part" if _files(folder) else "they are not in a folder for each class"
        words = counted(images, f"image in {folder.name} is", f"images in {folder.name} are")
        found += [f"{words} left out: {why}."] if images else []
    others = [file for part in parts for file in _visible(part) if file.suffix.lower() not in SUFFIXES]
    if others := [file for file in others if file.parent not in parts]:
        words = counted(len(others), "file in the folders of classes is", "files in the folders of classes are")
        found.append(f"{words} left out, such as {others[0].name}: images end with {', '.join(sorted(SUFFIXES))}.")
    return found


def _visible(folder: Path) -> list[Path]:
    """Return the files in a folder and below it, without hidden ones, such as copies in ``.ipynb_checkpoints``."""
    found = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return [file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts)]


def decoded_images(
    path: Path,
    files: Mapping[str, Sequence[ImageFile]],
    test_files: Mapping[str, Sequence[ImageFile]],
    side: int | None,
) -> Images:
    """Return the images of each class, all scaled to one size. Raise DataError for the first that cannot be decoded.

    ``files``, ``test_files``: name of a class → its images, in the training part and the test part. ``side``: as in
    ``read_folder``.
    """
    classes = tuple(sorted(files))
    if (count := sum(map(len, files.values()))) < MIN_IMAGES:
        raise DataError(f"{path}: found {count} images; expected at least {MIN_IMAGES}. Add images.")
    sizes, modes = _headers([file for name in classes for file in files[name]])
    grey = all(mode in ("1", "L", "LA") or mode.startswith("I") for mode in modes)
    bits = _grey_bits([file for name in classes for file in files[name]]) if any(m[:1] == "I" for m in modes) else 16
    median = int(np.median([min(size) for size in sizes.elements()]))
    side = side or min(max(median, MIN_SIDE), MAX_SIDE)
    notes = []
    if len(sizes) > 1 or next(iter(sizes)) != (side, side):
        low, high = min(sizes), max(sizes)
        notes.append(
            f"The images have {low[0]}×{low[1]} to {high[0]}×{high[1]} pixels. They are scaled to {side}×{side}."
        )
    if len(modes) > 1:
        found = ", ".join(f"{mode} ({n:,})" for mode, n in modes.most_common())
        notes.append(f"The images have different modes: {found}. They are converted to {'grey' if grey else 'RGB'}.")
    channels = 1 if grey else 3
    x, y = _decoded(path, files, classes, side, channels, bits)
    if not test_files:
        return Images(path, x, y, classes, notes=tuple(notes), grey_bits=bits)
    x_test, y_test = _decoded(path, test_files, classes, side, channels, bits)
    return Images(path, x, y, classes, x_test, y_test, tuple(notes), grey_bits=bits)


def has_images(path: Path) -> bool:
    """Return True if there is an image in the folder or below it."""
    return any(file.suffix.lower() in SUFFIXES for file in _visible(path))


def _files(path: Path) -> dict[str, list[ImageFile]]:
    """Return class → image files in its folder, for the folders that have images."""
    found = {}
    for folder in sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")):
        images = [ImageFile(str(file), file) for file in _visible(folder) if file.suffix.lower() in SUFFIXES]
        if images:
            found[folder.name] = images
    return found


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            "DATA: found a folder of images, but no Python package Pillow; expected this package. Run pip install "
            "'./operator[suggest]' in a clone of dljob."
        ) from None
    return Image


def _headers(files: Sequence[ImageFile]) -> tuple[Counter[tuple[int, int]], Counter[str]]:
    """Return the (width, height) and the modes of the images, with their numbers."""
    image_module = _pillow()
    sizes: Counter[tuple[int, int]] = Counter()
    modes: Counter[str] = Counter()
    for file in files:
        try:
            with image_module.open(file.opened()) as image:
                sizes[image.size] += 1
                modes[image.mode] += 1
                if image.mode == "F":
                    raise ValueError("its pixels are floating-point numbers, of which the white one is unknown")
        except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:
            raise _broken(file, error) from None
    return sizes, modes


def _grey_bits(files: Sequence[ImageFile]) -> int:
    """Return the number of bits of the largest grey value in images of more than 8 bits, at least 8."""
    image_module = _pillow()
    largest = 0
    for file in files:
        try:
            with image_module.open(file.opened()) as image:
                if image.mode.startswith("I"):
                    largest = max(largest, int(np.asarray(image).max()))
        except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:
            raise _broken(file, error) from None
    return max(8, largest.bit_length())


def _decoded(
    path: Path,
    files: Mapping[str, Sequence[ImageFile]],
    classes: Sequence[str],
    side: int,
    channels: int,
    grey_bits: int,
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    image_module = _pillow()
    count = sum(map(len, files.values()))
    if (nbytes := count * side * side * channels) > MAX_NBYTES:
        raise DataError(
            f"{path}: found {count:,} images, which take {nbytes / 2**20:,.0f} MiB at {side}×{side} pixels; expected "
            f"at most {MAX_NBYTES >> 20} MiB. Pass a smaller --image-size, or a random sample of the images."
        )
    x = np.empty((count, side, side, channels), dtype=np.uint8)
    y = np.empty(count, dtype=np.int64)
    place = 0
    for number, name in enumerate(classes):
        for file in files.get(name, ()):
            try:
                with image_module.open(file.opened()) as image:
                    scaled = _opaque(_upright(image), grey_bits).convert("L" if channels == 1 else "RGB")
                    resized = scaled.resize((side, side), image_module.Resampling.BILINEAR)
            except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:
                raise _broken(file, error) from None
            x[place] = np.asarray(resized, dtype=np.uint8).reshape(side, side, channels)
            y[place] = number
            place += 1
    return x, y


def _upright(image: Any) -> Any:
    """Return an image as viewers show it. Phones store how it is turned beside the pixels."""
    from PIL import ImageOps

    with suppress(Exception):  # Pillow raises errors of many kinds for invalid Exif data.
        return ImageOps.exif_transpose(image)
    return image


def _opaque(image: Any, grey_bits: int) -> Any:
    """Return an image of 8 bits on a white background. Pillow would cut larger values off, and show hidden colours."""
    image_module = _pillow()
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64).clip(0, 2**grey_bits - 1)
        return image_module.fromarray((values >> (grey_bits - 8)).astype(np.uint8))
    if image.has_transparency_data:
        return image_module.alpha_composite(image_module.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image


def _broken(file: ImageFile, error: Exception) -> DataError:
    text = "image file is truncated" if "truncated" in str(error) else " ".join(str(error).split())[:150]
    return DataError(
        f"{file.name}: found an image that cannot be decoded ({text}); expected a whole image. Replace or remove it."
    )


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays x, y and, if it has them, x_test and y_test of an ``.npz`` file. Raise DataError otherwise."""
    try:
        with zipfile.ZipFile(path) as packed:
            if (nbytes := sum(member.file_size for member in packed.infolist())) > MAX_ARRAYS_NBYTES:
                raise DataError(
                    f"{path}: found arrays of {nbytes >> 20:,} MiB; expected at most {MAX_ARRAYS_NBYTES >> 20:,}. Pass "
                    "a random sample of the images."
                )
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path}: found no readable .npz file ({error}); expected arrays x and y. Save it again."
        ) from None
    for names in (("x", "y"), ("x_test", "y_test")):
        present = [name for name in names if name in arrays]
        if len(present) != 2 and (present or names[0] == "x"):
            raise DataError(
                f"{path}: found the arrays {', '.join(arrays) or '(none)'}; expected {names[0]} and {names[1]}. Rename "
                "the arrays."
            )
        if present and (arrays[names[1]].ndim != 1 or arrays[names[0]].shape[:1] != arrays[names[1]].shape):
            shapes = f"{arrays[names[0]].shape} and {arrays[names[1]].shape}"
            raise DataError(
                f"{path}: {names[0]}, {names[1]}: found shapes {shapes}; expected one target for each sample. Correct "
                "the arrays."
            )
    if len(arrays["x"]) < MIN_IMAGES:
        raise DataError(f"{path}: x: found {len(arrays['x'])} samples; expected at least {MIN_IMAGES}. Add samples.")
    return arrays


def _check_pixels(path: Path, name: str, x: NDArray[Any] | None) -> None:
    """Raise DataError if an array is empty, or has values that are no numbers from which bytes can be made."""
    if x is None:
        return
    if not x.size:
        raise DataError(
            f"{path}: {name}: found the shape {x.shape}; expected images with pixels. Save the array again."
        )
    if x.dtype.kind not in "buif" or not np.isfinite(float(np.max(x)) - float(np.min(x))):
        finite = np.isfinite(x.reshape(len(x), -1)).all(axis=1) if x.dtype.kind == "f" else np.ones(1, dtype=bool)
        place = int(np.argmin(finite))
        raise DataError(
            f"{path}: {name}[{place}]: found values that are no finite numbers; expected pixels. Correct them."
        )


def _class_name(label: Any) -> str:
    """Return the name of a class in an array of labels."""
    if isinstance(label, bytes):
        return label.decode("utf-8", "replace")
    return str(int(label) if isinstance(label, float) else label)


def images_of_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> Images:
    """Return the images in arrays of shape (n, height, width), (n, height, width, c) or (n, c, height, width).

    Raise DataError for other shapes, values that are not finite, or targets that are no classes.
    """
    arrays = {n: (a.astype(np.uint8) * 255 if n.startswith("x") and a.dtype == bool else a) for n, a in arrays.items()}
    x, y = arrays["x"], arrays["y"]
    for name in ("x", "x_test"):
        _check_pixels(path, name, arrays.get(name))
    low, largest = float(np.min(x)), float(np.max(x))
    labels = np.unique(y)
    if y.dtype.kind == "f" and (labels % 1).any():
        raise DataError(f"{path}: y: found fractions; expected the classes of the images, as numbers or names.")
    if len(labels) < 2:
        raise DataError(f"{path}: y: found one class; expected at least two. Add images of another class.")
    span = (largest - low) or 1.0
    notes = []
    if x.dtype != np.uint8:
        notes.append(f"Pixels from {low:g} to {largest:g} are scaled to bytes.")

    def canonical(own: NDArray[Any]) -> NDArray[np.uint8]:
        if own.ndim == 3:
            own = own[..., None]
        elif own.ndim == 4 and own.shape[1] in (1, 3) and own.shape[3] not in (1, 3):
            own = own.transpose(0, 2, 3, 1)
        if own.ndim != 4 or own.shape[3] not in (1, 3) or min(own.shape[1:3]) < 4:
            raise DataError(
                f"{path}: x: found the shape {own.shape}; expected (images, height, width) for grey images of at least "
                "4×4 pixels, or a last axis of 3 colours. Reshape the array."
            )
        if own.dtype == np.uint8:
            return np.ascontiguousarray(own)
        return np.rint((own.astype(np.float64) - low) * (255 / span)).clip(0, 255).astype(np.uint8)

    names = tuple(_class_name(label) for label in labels.tolist())
    first = Images(path, canonical(x), np.searchsorted(labels, y).astype(np.int64), names, notes=tuple(notes))
    if "x_test" not in arrays:
        return first
    x_test, y_test = canonical(arrays["x_test"]), arrays["y_test"]
    if x_test.shape[1:] != first.x.shape[1:]:
        raise DataError(
            f"{path}: x_test: found images of shape {x_test.shape[1:]}; expected {first.x.shape[1:]}, as in x."
        )
    if unknown := set(np.unique(y_test).tolist()) - set(labels.tolist()):
        raise DataError(
            f"{path}: y_test: found the class {unknown.pop()!r}, which y does not have; expected its classes."
        )
    return Images(path, first.x, first.y, names, x_test, np.searchsorted(labels, y_test).astype(np.int64), tuple(notes))

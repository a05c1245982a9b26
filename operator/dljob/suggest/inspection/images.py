"""Inspect images: classes, imbalance, duplicates within and between the parts, constant images."""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dljob.suggest.errors import DataError
from dljob.suggest.inspection.target import RARE, single_findings
from dljob.suggest.reading.images import Images
from dljob.suggest.wording import counted


@dataclass(frozen=True)
class ImageFacts:
    """What a set of images holds."""

    images: int
    test_images: int
    """Number of images of a separate test part that do not repeat training images; 0 without one."""
    size: tuple[int, int]
    channels: int
    classes: dict[str, int]
    findings: tuple[str, ...]
    grey_bits: int = 16
    """As in ``Images``."""

    @property
    def rare(self) -> bool:
        """Return True if a class is so rare that accuracy says little about it."""
        return min(self.classes.values()) < RARE * self.images / len(self.classes)


def _digests(x: NDArray[np.uint8]) -> list[bytes]:
    """Return a digest of each image. Equal images have equal ones, which take less memory than the images."""
    return [hashlib.sha256(image.tobytes()).digest() for image in x]


def inspect_images(images: Images) -> ImageFacts:
    """Return the facts about images. Raise DataError if the test part only repeats training images."""
    findings = list(images.notes)
    counts = np.bincount(images.y, minlength=len(images.classes))
    classes = {name: int(count) for name, count in zip(images.classes, counts, strict=True)}
    own = _digests(images.x)
    labels: dict[bytes, int] = {}
    conflicts = 0
    for image, label in zip(own, images.y.tolist(), strict=True):
        conflicts += labels.setdefault(image, label) != label
    if images.x_test is None and len(classes) > len(labels) / 2:
        raise DataError(
            f"{images.path}: found {len(classes)} classes in {len(labels)} different images; expected at least two "
            "images for each class on average. Merge classes, or add images."
        )
    if repeated := len(own) - len(labels):
        words = counted(repeated, "image repeats another", "images repeat others")
        findings.append(f"{words}. Equal images stay in one part, training or test.")
    if conflicts:
        words = counted(conflicts, "image is in two classes", "images are in two classes")
        findings.append(f"{words}. At most one of the two can be right.")
    if constant := int(
        (images.x.reshape(len(own), -1).max(axis=1) == images.x.reshape(len(own), -1).min(axis=1)).sum()
    ):
        findings.append(f"{counted(constant, 'image has', 'images have')} one colour only.")
    test_images = 0
    if images.x_test is not None:
        test_images = sum(digest not in labels for digest in _digests(images.x_test))
        if not test_images:
            raise DataError(
                f"{images.path}: found a test part of {len(images.x_test)} images that all repeat training images; "
                "expected images that the model has not seen. Remove the test part to hold out a fifth of the images."
            )
        if repeated := len(images.x_test) - test_images:
            words = counted(repeated, "test image repeats a training image", "test images repeat training images")
            findings.append(f"{words}. The evaluation leaves such images out.")
    if images.x_test is None:
        findings += single_findings(classes, "image")
    facts = ImageFacts(
        images=len(own),
        test_images=test_images,
        size=(images.x.shape[1], images.x.shape[2]),
        channels=images.x.shape[3],
        classes=classes,
        findings=tuple(findings),
        grey_bits=images.grey_bits,
    )
    if facts.rare:
        rarest = min(classes, key=lambda name: classes[name])
        found = f"Class {rarest!r} is rare: {classes[rarest]} of {len(own)} images. Classes are weighted."
        return replace(facts, findings=(*facts.findings, found))
    return facts

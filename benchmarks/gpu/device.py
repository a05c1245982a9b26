"""The device of a benchmark: the first GPU, or a CPU to test the benchmark without one."""

import argparse
import sys

import torch

from dltrain.device.rank_device import product_label


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--device``."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: test without a GPU")


def chosen(device: str) -> str | None:
    """Return the name of the device type, as in plans. Print why and return None if there is no GPU.

    ``device``: value of the option.
    """
    if device == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        print("found no GPU; --device cpu tests this program without one", file=sys.stderr)
        return None
    return product_label(torch.cuda.get_device_name(0))

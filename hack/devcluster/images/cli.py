"""The command line of `hack/images`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from devcluster.errors import ClusterError
from devcluster.images import torch_build
from devcluster.images.builders import Builder, choose
from devcluster.images.inputs import IMAGES, Image, reference
from devcluster.kubernetes.provide import check_space
from devcluster.locks import locked
from devcluster.paths import cache_root
from devcluster.progress import Progress
from devcluster.providers import PROVIDERS
from devcluster.providers import choose as choose_provider


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(arguments)
    progress = Progress(quiet=options.quiet)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the command like Ctrl-C
    try:
        wanted = list(IMAGES.values()) if options.image == "all" else [IMAGES[options.image]]
        build_arguments = chosen_arguments(_build_arguments(options.build_arg), options.provider)
        references = {image.name: reference(image, build_arguments, options.registry) for image in wanted}
        if not options.print:
            builder = choose(progress)
            build(builder, wanted, references, build_arguments, progress)
            if options.load and options.registry and options.provider == "existing":
                _push(builder, list(references.values()), progress)
            elif options.load:
                provider = choose_provider(options.provider, options.name, progress)
                with tempfile.TemporaryDirectory(prefix="dljob-images-") as folder:
                    provider.load(builder.archives(list(references.values()), Path(folder)))
        print(json.dumps(references))
    except (ClusterError, ValueError) as failure:
        print(f"hack/images: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hack/images: stopped", file=sys.stderr)
        return 130
    return 0


def build(
    builder: Builder,
    wanted: Sequence[Image],
    references: Mapping[str, str],
    arguments: Mapping[str, str],
    progress: Progress,
) -> None:
    """Build those images in `wanted` that the builder does not have yet.

    `references`: image name → reference under which the builder stores the image. `arguments`: build arguments.
    """
    with locked("builds"):
        for image in wanted:
            name = references[image.name]
            if builder.has(name):
                progress.say(f"{name} is built")
                continue
            check_space(cache_root(), image.needed_nbytes, f"building the {image.name} image")
            with progress.step(f"building {name} with {builder.name}", expected_s=image.expected_s):
                builder.build(image, name, arguments)


def _push(builder: Builder, references: Sequence[str], progress: Progress) -> None:
    for name in references:
        with progress.step(f"pushing {name}"):
            builder.push(name)


def chosen_arguments(given: Mapping[str, str], provider: str | None) -> dict[str, str]:
    """Return the build arguments `given`, plus TORCH_INDEX to select PyTorch's CPU build if it suits this machine.

    Do not add TORCH_INDEX if `given` already selects a build of PyTorch, or if `provider` is existing, because the
    nodes of that cluster are other machines.
    """
    index = torch_build.index() if provider != "existing" and not {"TORCH", "TORCH_INDEX"} & set(given) else ""
    return {**given, **({"TORCH_INDEX": index} if index else {})}


def _build_arguments(words: Sequence[str]) -> dict[str, str]:
    arguments = {}
    for word in words:
        key, found, value = word.partition("=")
        if not key or not found:
            raise ValueError(f"--build-arg: found {word!r}; expected NAME=VALUE, such as TORCH_INDEX=https://…")
        arguments[key] = value
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hack/images",
        description="Builds the images (only where their inputs changed) and prints their references as JSON.",
    )
    parser.add_argument(
        "image", nargs="?", choices=(*IMAGES, "all"), default="all", help="image to build (default: all)"
    )
    parser.add_argument("--load", action="store_true", help="also load the images into the cluster's nodes")
    parser.add_argument("--print", action="store_true", help="print the references of the images and build nothing")
    parser.add_argument(
        "--registry",
        default=os.environ.get("DLJOB_REGISTRY"),
        help="prefix of the references ($DLJOB_REGISTRY); with --provider existing, --load pushes there",
    )
    parser.add_argument(
        "--build-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="build argument BASE, TORCH or TORCH_INDEX",
    )
    parser.add_argument(
        "--name", default=os.environ.get("DLJOB_CLUSTER", "dev"), help="cluster for --load (default: dev)"
    )
    parser.add_argument("--provider", choices=PROVIDERS, help="as for hack/cluster")
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    return parser

"""Fill the cache for a cluster: prepare the programs of Kubernetes and both images at the same time."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from devcluster.embedded import packages
from devcluster.embedded.nodes import image_seed
from devcluster.embedded.provider import Embedded, kubernetes_of
from devcluster.images.builders import choose
from devcluster.images.cli import build, chosen_arguments
from devcluster.images.inputs import IMAGES, reference
from devcluster.kubernetes.provide import provide
from devcluster.model import ClusterSpec
from devcluster.progress import Progress
from devcluster.provider import Provider
from devcluster.shell import end_running


def prepare(spec: ClusterSpec, provider: Provider, progress: Progress) -> str:
    """Put the images and the Kubernetes programs into the cache, so that `hack/cluster up` starts fast.

    Return {image name: reference} as JSON. Images and programs are built at the same time. If one build fails, stop the
    other one and raise the error. Results that are finished by then stay in the cache. The Kubernetes programs are
    needed only for the embedded provider.
    """
    arguments = chosen_arguments({}, provider.name)
    references = {name: reference(image, arguments, None) for name, image in IMAGES.items()}

    def make_images() -> None:
        build(choose(progress), list(IMAGES.values()), references, arguments, progress)
        if isinstance(provider, Embedded):
            image_seed.prepare(progress)  # while Kubernetes is built, not after it

    tasks: list[Callable[[], object]] = [make_images]
    if isinstance(provider, Embedded):
        packages.install({**packages.RUNTIME, **packages.IMAGE_BUILD}, progress)
        tasks.insert(0, lambda: provide(kubernetes_of(spec), progress))
    pool = ThreadPoolExecutor(max_workers=len(tasks))
    running: set[Future[object]] = {pool.submit(task) for task in tasks}
    try:
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                one.result()
    except BaseException:
        end_running()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return json.dumps(references)

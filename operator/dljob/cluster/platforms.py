"""Operating systems and processor architectures of nodes: which nodes can run the containers of jobs at all."""

from collections.abc import Collection, Mapping

OS_LABEL, ARCHITECTURE_LABEL = "kubernetes.io/os", "kubernetes.io/arch"
"""Labels that the kubelet sets on its node: its operating system and its processor architecture."""
OS = "linux"
"""Operating system of the nodes of jobs."""
VALUE = "nodes.architectures"
"""Chart value with the processor architectures of the nodes of jobs."""
ARCHITECTURES = ("386", "amd64", "arm", "arm64", "loong64", "mips64le", "ppc64le", "riscv64", "s390x")
"""Processor architectures, as Go and Kubernetes name them."""
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386", "loongarch64": "loong64"}
"""Names in the Linux kernel (``uname -m``) that differ from those of Kubernetes."""


def architecture(machine: str) -> str:
    """Return Kubernetes' name of a processor architecture. ``machine``: its name in the kernel, such as x86_64."""
    return _MACHINES.get(machine.lower(), machine.lower())


def platform_error(labels: Mapping[str, str], architectures: Collection[str] = ()) -> str | None:
    """Return why no pod of a job can run on a node with these labels: its operating system or its architecture.

    Return None if pods can run there. A label that the node lacks is no obstacle. ``architectures``: those for which
    the trainer image is built; empty: any.
    """
    found = labels.get(OS_LABEL) or OS
    if found != OS:
        return f"label {OS_LABEL}: found {found}; expected {OS}, which the images of jobs need. Add Linux nodes"
    found = labels.get(ARCHITECTURE_LABEL) or ""
    if not found or not architectures or found in architectures:
        return None
    return (
        f"label {ARCHITECTURE_LABEL}: found {found}; expected {' or '.join(sorted(architectures))}, as in the chart "
        f"value {VALUE} (default: the architecture of the operator's node). If the images of jobs are built for "
        f"{found} too, set {VALUE} to all of their architectures"
    )

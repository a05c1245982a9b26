"""Predicted ratio of parameter server to ring from 2 to 512 nodes, compared with published ratios.

    python -m benchmarks.perfmodel.literature [--alpha-us 50] [--bandwidth-GBps 1.25] [--reduce-GBps 5]
        [--servers 1 4 8] [--json]

Communication of one step of AlexNet, GoogLeNet and ResNet-50 from their gradient sizes alone, whole or layer by layer;
the layers are those that plans are made with (``perf.references``).
Nothing is fitted to the published figures: alpha and beta are those of 10 Gbit Ethernet over TCP unless stated, and the
table says where a ratio is off and why. The published ratios are known to us second hand, without the machines' alpha
and beta; so their shape is to be met (rising with n, where they cross 1), not their digits.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass

import numpy as np

from dljob.perf.step.communication import Link, butterfly_s, parameter_server_s, ring_s
from dljob.perf.workload.layers import Net
from dljob.perf.workload.models import resnet50
from dljob.perf.workload.references import IMAGENET, alexnet, googlenet
from dljob.perf.workload.workload import REAL_NBYTES

NODES = tuple(2**k for k in range(1, 10))


def messages(net: Net) -> list[int]:
    """Parameters of each layer that is sent by itself: a norm's go with those of the layer before."""
    found: list[int] = []
    for layer in net.layers:
        if layer.kind == "norm" and found:
            found[-1] += layer.parameters
        elif layer.parameters:
            found.append(layer.parameters)
    return found


MODELS = {"AlexNet": messages(alexnet(IMAGENET)), "GoogLeNet": messages(googlenet(IMAGENET))} | {
    "ResNet-50": messages(resnet50(IMAGENET))
}


@dataclass(frozen=True)
class Row:
    """Seconds of one step's communication, and their ratios."""

    model: str
    nodes: int
    servers: int
    whole_ratio: float
    """Parameter server over ring, all gradients in one message."""
    layered_ratio: float
    """The same, a message for each layer."""
    default_over_ring: float
    """Butterfly (recursive doubling), what MPI libraries fall back to, over ring."""


def row(model: str, nodes: int, servers: int, link: Link) -> Row:
    """Ratios of a model on ``nodes`` of which ``servers`` serve, at most half of them."""
    layers = [float(REAL_NBYTES * p) for p in MODELS[model]]
    whole, serving = sum(layers), min(servers, nodes // 2)
    server_s, ring_whole_s = parameter_server_s(whole, nodes, link, serving), ring_s(whole, nodes, link)
    server_layers = sum(float(parameter_server_s(v, nodes, link, serving)) for v in layers)
    ring_layers = sum(float(ring_s(v, nodes, link)) for v in layers)
    return Row(
        model,
        nodes,
        serving,
        float(server_s / ring_whole_s),
        server_layers / ring_layers,
        float(butterfly_s(whole, nodes, link) / ring_whole_s),
    )


def crossing(model: str, servers: int, link: Link, layered: bool) -> int | None:
    """The first node count, from 2, at which the ring is the faster one for good."""
    ratios = [(n, row(model, n, servers, link)) for n in range(2, 513)]
    slower = [n for n, r in ratios if (r.layered_ratio if layered else r.whole_ratio) <= 1]
    return None if slower and slower[-1] == 512 else (slower[-1] + 1 if slower else 2)


@dataclass(frozen=True)
class Published:
    """A ratio that others measured, and what the model says of the same case."""

    claim: str
    published: str
    predicted: str
    gap: str


def published(link: Link, servers: list[int]) -> list[Published]:
    ratios = {m: row(m, 256, servers[-1], link).whole_ratio for m in MODELS}
    layered = {m: row(m, 32, 1, link).layered_ratio for m in ("AlexNet", "GoogLeNet")}
    default = [row(m, 512, 1, link).default_over_ring for m in MODELS]
    crossings = {m: [crossing(m, s, link, layered=True) for s in servers] for m in MODELS}
    by_servers = "; ".join(f"{m} {', '.join(str(c or '>512') for c in found)}" for m, found in crossings.items())
    return [
        Published(
            "ring overtakes the parameter server",
            "near 16 nodes (AlexNet), 8 (others)",
            f"layer by layer, with {', '.join(map(str, servers))} servers: {by_servers} (2: the ring is always faster)",
            "in one message the ring is never slower: (n-1)/n of the server's volume. It loses only by 2 (n-1) alpha a "
            "message, so small layers cross late and AlexNet's large ones do not; the published order is the other way "
            "round, so what slowed that ring was not latency a message",
        ),
        Published(
            "parameter server / ring at 256 nodes",
            "10",
            f"with {servers[-1]} servers: {', '.join(f'{m} {r:.1f}' for m, r in ratios.items())}",
            "n / s, less what the ring's latency adds: the smaller the gradients, the smaller the ratio",
        ),
        Published(
            "parameter server / ring at 32 nodes, layer by layer",
            "77 and 98",
            f"one server: {', '.join(f'{m} {r:.1f}' for m, r in layered.items())}",
            "at most 32 by volume: incast, and a server that unpacks tensors one after another, are not in the model",
        ),
        Published(
            "default all-reduce / ring at 512 nodes",
            "2.3 to 4.1",
            f"butterfly: {min(default):.1f} to {max(default):.1f}",
            "log2 n (V beta + V gamma) over 2 V beta + V gamma; less where the ring's latency counts",
        ),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alpha-us", type=float, default=50.0, help="latency of a message")
    parser.add_argument("--bandwidth-GBps", type=float, default=1.25)
    parser.add_argument("--reduce-GBps", type=float, default=5.0, help="speed of adding buffers")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    try:
        link = Link(1e-6 * asked.alpha_us, 1e9 * asked.bandwidth_GBps, 1e9 * asked.reduce_GBps, "assumed")
    except ValueError as e:
        parser.error(str(e))
    if min(asked.servers) < 1 or not np.isfinite(asked.alpha_us):
        parser.error(f"--servers {min(asked.servers)}, --alpha-us {asked.alpha_us}: expected 1 or more, and a number")
    rows = [row(m, n, s, link) for m in MODELS for s in asked.servers for n in NODES]
    claims = published(link, sorted(asked.servers))
    if asked.json:
        print(
            json.dumps({"link": asdict(link), "rows": list(map(asdict, rows)), "published": list(map(asdict, claims))})
        )
        return 0
    print(f"alpha {asked.alpha_us:g} us, beta 1/{asked.bandwidth_GBps:g} s/GB, gamma 1/{asked.reduce_GBps:g} s/GB")
    for model, layers in MODELS.items():
        print(f"\n{model}: {sum(layers) / 1e6:.1f} M parameters in {len(layers)} layers; parameter server / ring")
        print(f"{'nodes':>24}" + "".join(f"{n:>8}" for n in NODES))
        for servers in asked.servers:
            mine = [r for r in rows if r.model == model][asked.servers.index(servers) * len(NODES) :][: len(NODES)]
            for kind, ratios in (("whole", [r.whole_ratio for r in mine]), ("layers", [r.layered_ratio for r in mine])):
                print(f"{servers:>3} servers, {kind:>9}   " + "".join(f"{r:8.2f}" for r in ratios))
    for claim in claims:
        print(f"\n{claim.claim}\n  published: {claim.published}\n  predicted: {claim.predicted}\n  gap: {claim.gap}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

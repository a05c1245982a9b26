"""Compare the predicted ratio of parameter server to ring, on 2 to 512 nodes, with published ratios.

    python -m benchmarks.perfmodel.literature [--alpha-us 50] [--bandwidth-GBps 1.25] [--reduce-GBps 5]
        [--servers 1 4 8] [--json]

The communication time of one step of AlexNet, GoogLeNet and ResNet-50 is predicted from the gradient sizes alone, in
one message or layer by layer. The planner uses the same layers (``perf.references``). Nothing is fitted to the
published figures: by default alpha and beta are those of 10 Gbit Ethernet over TCP. The table says where a ratio is off
and why. The published ratios come from secondary sources that do not state alpha and beta, so only their shape is
compared (rising with n, crossing 1), not their values.
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
    """Return the parameters per message. A normalization layer shares the message of the layer before it."""
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
    """The same, one message per layer."""
    default_over_ring: float
    """Butterfly (recursive doubling, the fallback of MPI libraries) over ring."""


def row(model: str, nodes: int, servers: int, link: Link) -> Row:
    """Return the ratios of a model on ``nodes``. Of these, ``servers`` are servers, but at most half."""
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
    """Return the smallest number of nodes from which on the ring is always faster, or None."""
    ratios = [(n, row(model, n, servers, link)) for n in range(2, 513)]
    slower = [n for n, r in ratios if (r.layered_ratio if layered else r.whole_ratio) <= 1]
    return None if slower and slower[-1] == 512 else (slower[-1] + 1 if slower else 2)


@dataclass(frozen=True)
class Published:
    """A published ratio and the model's prediction for the same case."""

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
            "in one message the ring is never slower: (n-1)/n of the server's volume. Its only disadvantage is 2 (n-1) "
            "alpha per message, so small layers cross late and AlexNet's large ones do not; the published order is the "
            "opposite, so latency per message did not slow that ring",
        ),
        Published(
            "parameter server / ring at 256 nodes",
            "10",
            f"with {servers[-1]} servers: {', '.join(f'{m} {r:.1f}' for m, r in ratios.items())}",
            "n / s, reduced by the ring's latency: the smaller the gradients, the smaller the ratio",
        ),
        Published(
            "parameter server / ring at 32 nodes, layer by layer",
            "77 and 98",
            f"one server: {', '.join(f'{m} {r:.1f}' for m, r in layered.items())}",
            "at most 32 by volume; the model has no incast and no server that unpacks tensors one after another",
        ),
        Published(
            "default all-reduce / ring at 512 nodes",
            "2.3 to 4.1",
            f"butterfly: {min(default):.1f} to {max(default):.1f}",
            "log2 n (V beta + V gamma) over 2 V beta + V gamma; less where the ring's latency matters",
        ),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alpha-us", type=float, default=50.0, help="latency of a message")
    parser.add_argument("--bandwidth-GBps", type=float, default=1.25)
    parser.add_argument("--reduce-GBps", type=float, default=5.0, help="speed of adding buffers")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        link = Link(1e-6 * options.alpha_us, 1e9 * options.bandwidth_GBps, 1e9 * options.reduce_GBps, "assumed")
    except ValueError as e:
        parser.error(str(e))
    if min(options.servers) < 1 or not np.isfinite(options.alpha_us):
        parser.error(
            f"--servers {min(options.servers)}, --alpha-us {options.alpha_us}: expected 1 or more, and a number"
        )
    rows = [row(m, n, s, link) for m in MODELS for s in options.servers for n in NODES]
    claims = published(link, sorted(options.servers))
    if options.json:
        print(
            json.dumps({"link": asdict(link), "rows": list(map(asdict, rows)), "published": list(map(asdict, claims))})
        )
        return 0
    print(
        f"alpha {options.alpha_us:g} us, beta 1/{options.bandwidth_GBps:g} s/GB, gamma 1/{options.reduce_GBps:g} s/GB"
    )
    for model, layers in MODELS.items():
        print(f"\n{model}: {sum(layers) / 1e6:.1f} M parameters in {len(layers)} layers; parameter server / ring")
        print(f"{'nodes':>24}" + "".join(f"{n:>8}" for n in NODES))
        for servers in options.servers:
            mine = [r for r in rows if r.model == model][options.servers.index(servers) * len(NODES) :][: len(NODES)]
            for kind, ratios in (("whole", [r.whole_ratio for r in mine]), ("layers", [r.layered_ratio for r in mine])):
                print(f"{servers:>3} servers, {kind:>9}   " + "".join(f"{r:8.2f}" for r in ratios))
    for claim in claims:
        print(f"\n{claim.claim}\n  published: {claim.published}\n  predicted: {claim.predicted}\n  gap: {claim.gap}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

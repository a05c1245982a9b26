"""Cluster DNS: dnsmasq with the names of Services and of the pods of headless Services."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

from devcluster.embedded.processes import send
from devcluster.embedded.services.api import Api, Object
from devcluster.embedded.services.watching import Mirror, Reconciler
from devcluster.embedded.state import State

DOMAIN = "cluster.local"
PROCESS = "dnsmasq"


def records(services: Iterable[Object], endpoints: Iterable[Object]) -> Iterator[str]:
    """Yield the lines of a hosts file.

    A Service with an address has one line. A headless Service has one line per pod, which also contains the pod's own
    name. Pods that are not ready are included if the Service sets `publishNotReadyAddresses`.
    """
    by_name = {(one["metadata"]["namespace"], one["metadata"]["name"]): one for one in endpoints}
    for service in services:
        name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
        full, address = f"{name}.{namespace}.svc.{DOMAIN}", service["spec"].get("clusterIP")
        if address and address != "None":
            yield f"{address} {full}"
            continue
        unready = bool(service["spec"].get("publishNotReadyAddresses"))
        for subset in by_name.get((namespace, name), {}).get("subsets") or []:
            addresses = list(subset.get("addresses") or [])
            addresses += (subset.get("notReadyAddresses") or []) if unready else []
            for one in addresses:
                host = one.get("hostname") or one["ip"].replace(".", "-")
                yield f"{one['ip']} {host}.{full} {full}"


def command(state: State, address: str) -> list[str]:
    """Return the command line of dnsmasq in the network namespace of the switch.

    dnsmasq answers only for names of the cluster, because this namespace has no connection to other networks.
    `address`: the address on which dnsmasq listens.
    """
    hosts = _hosts(state)
    hosts.parent.mkdir(exist_ok=True)
    hosts.touch()
    return [
        *("nsenter", f"--net=/run/netns/{state.prefix}", "dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null"),
        *(f"--listen-address={address}", "--bind-interfaces", "--no-hosts", "--no-resolv", "--user=root"),
        *("--pid-file=", f"--addn-hosts={hosts}", f"--local=/{DOMAIN}/", "--local-ttl=1", "--cache-size=0"),
        "--log-facility=-",
    ]


def serve(state: State, lines: Iterable[str]) -> None:
    """Write `lines`, sorted and without duplicates, to the hosts file of dnsmasq.

    If the content of the file changed and dnsmasq runs, send it SIGHUP, so that it reads the file again.
    """
    text, hosts = "".join(f"{line}\n" for line in sorted(set(lines))), _hosts(state)
    if text != hosts.read_text():
        scratch = hosts.with_suffix(".new")
        scratch.write_text(text)
        scratch.replace(hosts)
        server = state.processes.get(PROCESS)
        if server:
            send(server, signal.SIGHUP)


def _hosts(state: State) -> Path:
    return state.folder / "dns" / "hosts"


def reconciler(api: Api, state: State) -> Reconciler:
    """Return the reconciler that updates the hosts file of dnsmasq after changes of Services or Endpoints."""

    def step() -> None:
        serve(state, records(services.objects(), endpoints.objects()))

    loop = Reconciler(step, "dns")
    services = Mirror(api, "/api/v1/services", loop.wake)
    endpoints = Mirror(api, "/api/v1/endpoints", loop.wake)
    return loop

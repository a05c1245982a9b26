"""Cluster DNS: dnsmasq, fed with the names of Services and of the pods behind headless ones."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from devcluster.embedded.api import Api, Object
from devcluster.embedded.watching import Mirror, Reconciler

DOMAIN = "cluster.local"


def records(services: Iterable[Object], endpoints: Iterable[Object]) -> Iterator[str]:
    """Lines of a hosts file.

    A Service with an address gives one; a headless one gives one per pod, under the pod's own name too, and counts
    pods that are not ready where it says `publishNotReadyAddresses`.
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


class NameServer:
    """dnsmasq and its hosts file; answers for the cluster's own names only, there is no way out."""

    def __init__(self, folder: Path, netns: str, address: str) -> None:
        folder.mkdir(exist_ok=True)
        self._hosts = folder / "hosts"
        self._hosts.write_text("")
        command = [
            *(
                "nsenter",
                f"--net=/run/netns/{netns}",
                "setpriv",
                "--pdeathsig",
                "KILL",
                "dnsmasq",
                "--keep-in-foreground",
                "--conf-file=/dev/null",
            ),
            *(f"--listen-address={address}", "--bind-interfaces", "--no-hosts", "--no-resolv", "--user=root"),
            *("--pid-file=", f"--addn-hosts={self._hosts}", f"--local=/{DOMAIN}/", "--local-ttl=1", "--cache-size=0"),
            "--log-facility=-",
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def update(self, lines: Iterable[str]) -> None:
        """Serves these records from now on."""
        text = "".join(f"{line}\n" for line in sorted(set(lines)))
        if self._process.poll() is not None:
            sys.exit(f"dnsmasq ended with {self._process.returncode}")
        if text != self._hosts.read_text():
            scratch = self._hosts.with_suffix(".new")
            scratch.write_text(text)
            scratch.replace(self._hosts)
            self._process.send_signal(signal.SIGHUP)


def reconciler(api: Api, server: NameServer) -> Reconciler:
    """Keeps the name server in step with the API."""

    def step() -> None:
        server.update(records(services.objects(), endpoints.objects()))

    loop = Reconciler(step, "dns")
    services = Mirror(api, "/api/v1/services", loop.wake)
    endpoints = Mirror(api, "/api/v1/endpoints", loop.wake)
    return loop

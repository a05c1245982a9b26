"""Find the network interface that has a given address. Linux only, with the standard library."""

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str:
    """Return the name of the interface with this IPv4 or IPv6 address. Raise ValueError if there is none."""
    wanted = ipaddress.ip_address(address)
    names = [name for _, name in socket.if_nameindex()]
    if wanted.version == 6:
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if int(digits, 16) == int(wanted):
                return name
    else:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            for name in names:
                try:
                    answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                except OSError:
                    continue  # The interface has no IPv4 address.
                if answer[20:24] == wanted.packed:
                    return name
    raise ValueError(
        f"DLJOB_POD_IP: found {address}; expected the address of one of this pod's network interfaces {names}"
    )

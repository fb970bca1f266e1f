"""The addresses of this host: which one others are to use."""

from __future__ import annotations

import fcntl
import socket
import struct

from msgspec import structs

from paceline.errors import ConfigError
from paceline.runtime.live.protocol.configuration import MultihostOptions

EVERYWHERE = "0.0.0.0"
SIOCGIFADDR = 0x8915


def host_and_port(address: str) -> tuple[str, int]:
    """Splits tcp://HOST:PORT."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            there = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(f"interface {interface!r} has no address here ({error.strerror}); {there}") from None
    return socket.inet_ntoa(answer[20:24])


def address_towards(master: str, port: int) -> str:
    """Returns this node's address on the network by which it reaches the first node."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, port))  # nothing is sent
            address = str(probe.getsockname()[0])
        except OSError as error:
            raise ConfigError(f"{master}, where the launcher says that rank 0 is, cannot be reached: {error}") from None
    return routable(EVERYWHERE) if address.startswith("127.") else address


def routable(host: str) -> str:
    """Returns the address to advertise: of a listener on all interfaces, that of the default route's."""
    return host if host != EVERYWHERE else leading_to("192.0.2.1")


def leading_to(address: str) -> str:
    """Returns this host's address on the interface by which it reaches `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # nothing is sent: the kernel says which interface it would leave by
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def on_host(multihost: MultihostOptions, advertise: str) -> MultihostOptions:
    """Returns the options for another host, which others reach by the address `advertise`."""
    host = EVERYWHERE if multihost.host == EVERYWHERE else advertise
    return structs.replace(multihost, host=host, advertise=advertise)

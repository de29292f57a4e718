"""The addresses of this host's own interfaces, without the ones that every host has alike."""

from __future__ import annotations

# A container bridge has the same address on every node of a cluster.
BRIDGES = ("lo", "docker", "virbr", "br-", "cni", "podman", "lxcbr", "lxdbr", "veth")
SIOCGIFCONF = 0x8912  # netdevice(7)
IFREQ_BYTES = 40
LARGEST_ANSWER = 64 * IFREQ_BYTES
IPV6_TABLE = "/proc/net/if_inet6"


def addresses() -> list[str]:
    """IPv4 then IPv6, in the kernel's order. Empty where the kernel does not tell."""
    return [address for name, address in _ipv4() + _ipv6() if not name.startswith(BRIDGES)]


def _ipv4() -> list[tuple[str, str]]:
    import _socket as socket
    import array
    import fcntl
    import struct

    buffer = array.array("B", bytes(LARGEST_ANSWER))
    where, size = buffer.buffer_info()
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        answer = fcntl.ioctl(sock.fileno(), SIOCGIFCONF, struct.pack("iP", size, where))
    except OSError:
        return []
    finally:
        sock.close()
    used = struct.unpack("iP", answer)[0]
    entries = (buffer.tobytes()[start : start + IFREQ_BYTES] for start in range(0, used, IFREQ_BYTES))
    return [(entry[:16].split(b"\0")[0].decode(), socket.inet_ntoa(entry[20:24])) for entry in entries]


def _ipv6() -> list[tuple[str, str]]:
    import _socket as socket

    found = []
    for line in _read(IPV6_TABLE).splitlines():
        digits, _, _, scope, _, name = line.split()
        if scope == "00":  # global; a link-local address is no name for a peer
            found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""

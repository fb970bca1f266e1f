"""The first process of a host: it makes what is the host's own, then waits until its standard input closes.

`unshare` starts it as process 1 of new namespaces. When it ends, the kernel kills every process of the host and takes
the mounts and the network with it; and it ends when the harness lets go of its input, so also when that dies.

    python holder.py HOSTNAME [FOLDER ...]      folders below /tmp that stay in sight
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def own_folders(visible: list[str]) -> None:
    """A /tmp and a /dev/shm of one's own. The new /tmp is made at /dev/shm, while the old one can still be seen."""
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    for folder in visible:
        place = "/dev/shm" + folder.removeprefix("/tmp")
        os.makedirs(place)
        mount("--bind", folder, place)
    mount("--move", "/dev/shm", "/tmp")
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")


def main() -> None:
    # The /proc of the machine still stands, and names this process as the machine does.
    known_as = os.readlink("/proc/self")
    mount("-t", "proc", "proc", "/proc")
    own_folders(sys.argv[2:])
    socket.sethostname(sys.argv[1])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # Process 1 inherits every orphan; ignoring their ends leaves no zombie.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print(known_as, flush=True)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()

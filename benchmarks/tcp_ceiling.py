"""How many exchanges a second TCP over loopback allows on this machine: the bytes of an exchange, and nothing else.

    python benchmarks/tcp_ceiling.py --params 1000000 [--sendfile] [--buffer 1000000]

Four processes send a gradient's bytes to a fifth and read as many back; nobody looks at them. `paceline bench exchange
--transport tcp` prints what the whole exchange does.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import resource
import select
import signal
import socket
import time

WORKERS = 4


class Bytes:
    """As many as an exchange has, to be sent or to be read into."""

    def __init__(self, size: int, sendfile: bool) -> None:
        self.size = size
        self.sendfile = sendfile
        self.file = os.memfd_create("bytes")
        os.ftruncate(self.file, size)
        self.view = memoryview(mmap.mmap(self.file, size))
        self.view[:] = b"x" * size

    def send(self, connection: socket.socket, at: int) -> int:
        if self.sendfile:
            return os.sendfile(connection.fileno(), self.file, at, self.size - at)
        return connection.send(self.view[at:])


def prepared(connection: socket.socket, options: argparse.Namespace) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if options.buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.buffer)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options.buffer)
    return connection


def work(port: int, options: argparse.Namespace) -> None:
    connection = prepared(socket.create_connection(("127.0.0.1", port)), options)
    out, into = Bytes(options.nbytes, options.sendfile), Bytes(options.nbytes, False)
    while True:
        at = 0
        while at < out.size:
            at += out.send(connection, at)
        at = 0
        while at < into.size:
            at += connection.recv_into(into.view[at:])


class Client:
    def __init__(self, connection: socket.socket, nbytes: int) -> None:
        self.connection = connection
        self.into = Bytes(nbytes, False)
        self.read = self.sent = 0


def serve(listener: socket.socket, options: argparse.Namespace) -> float:
    """Exchanges a second."""
    out, epoll, clients = Bytes(options.nbytes, options.sendfile), select.epoll(), {}
    for _ in range(WORKERS):
        connection = prepared(listener.accept()[0], options)
        connection.setblocking(False)
        clients[connection.fileno()] = Client(connection, options.nbytes)
        epoll.register(connection.fileno(), select.EPOLLIN)
    done, began, warm = 0, 0.0, 5 * WORKERS
    while not began or time.perf_counter() < began + options.seconds:
        for descriptor, _ in epoll.poll():
            client = clients[descriptor]
            try:
                while client.read < out.size:
                    client.read += client.connection.recv_into(client.into.view[client.read :])
                while client.sent < out.size:
                    client.sent += out.send(client.connection, client.sent)
            except BlockingIOError:
                epoll.modify(descriptor, select.EPOLLIN if client.read < out.size else select.EPOLLOUT)
                continue
            client.read = client.sent = 0
            epoll.modify(descriptor, select.EPOLLIN)
            done += 1
            if done == warm:
                began = time.perf_counter()
    return (done - warm) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1e6)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--sendfile", action="store_true", help="send from shared memory without a copy")
    parser.add_argument(
        "--buffer", type=int, default=0, help="bytes of the kernel's buffers, instead of its own choice"
    )
    options = parser.parse_args()
    options.nbytes = 4 * int(options.params)
    listener = socket.create_server(("127.0.0.1", 0))
    workers = []
    for _ in range(WORKERS):
        worker = os.fork()
        if worker == 0:
            with contextlib.suppress(OSError):
                work(listener.getsockname()[1], options)
            os._exit(0)
        workers.append(worker)
    try:
        rate = serve(listener, options)
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    busy_s = sum(each.ru_utime + each.ru_stime for each in used)
    print(
        f"{options.params:.0e} parameters: {rate:.0f} exchanges/s, "
        f"{1000 * busy_s / (rate * options.seconds):.2f} ms of processor time each"
    )


if __name__ == "__main__":
    main()

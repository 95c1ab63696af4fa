"""Carries connections from a listening socket of the host's network to a port of the node, from inside.

The socket was opened before the namespaces were made and inherited, so that connections made to it on the host
are accepted here. (socat learned to do this only in 1.8.)
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_CHUNK = 256 * 1024


def serve(fd: int, address: tuple[str, int]) -> None:
    """Accept for ever on the inherited listening socket `fd`."""
    listener = socket.socket(fileno=fd)
    while True:
        try:
            client, _ = listener.accept()
        except OSError:  # out of file descriptors, or the client has gone again
            time.sleep(0.1)
            continue
        threading.Thread(target=_connect, args=(client, address), daemon=True).start()


def _connect(client: socket.socket, address: tuple[str, int]) -> None:
    with client:
        try:
            server = socket.create_connection(address, timeout=10)
        except OSError:
            return
        with server:
            server.settimeout(None)
            for s in (client, server):
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            back = threading.Thread(target=_pump, args=(server, client), daemon=True)
            back.start()
            _pump(client, server)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copy until the source ends, then pass the end on; an error ends both directions."""
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    try:
        while n := source.recv_into(buffer):
            sink.sendall(view[:n])
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for s in (source, sink):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

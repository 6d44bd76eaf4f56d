"""The socket that a server listens on, and how many connections its process may hold."""

from __future__ import annotations

import resource
import socket

BACKLOG = 2048
"""Connections that the system keeps until they are accepted."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: from here on clients wait until they are served. ValueError for a port in use."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ValueError(
            f"{host}:{port} cannot be listened on ({error.strerror}): choose another --host or --port"
        ) from None


def raise_file_limit() -> None:
    """Let the process hold as many connections as the system allows; by default that is often 1024 files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

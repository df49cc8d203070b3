"""A reward that asks a server on this host, as one that asks another model does."""

import os
import socket


def digits(completion: str) -> float:
    with socket.create_connection(("127.0.0.1", int(os.environ["REWARD_SERVER"])), timeout=10) as server:
        server.sendall(str(sum(c.isdigit() for c in completion) / 8).encode())
        server.shutdown(socket.SHUT_WR)
        return float(server.recv(64))

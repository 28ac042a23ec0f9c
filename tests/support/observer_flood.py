"""`python -m tests.support.observer_flood KEYS ENDPOINT REQUEST CONNECTIONS`: an observer that
sends requests as fast as libzmq takes them, over many connections, and reads all answers."""

import sys
import time
from pathlib import Path

import zmq

from rpc_schema import lifecycle as lc
from rpc_schema.codec import encode_control
from rpc_schema.health import CheckHealth, Hello
from rpc_schema.version import PROTOCOL_VERSION
from worker_client.wire.endpoint import new_driver_id
from worker_host.key_files import read_secret_key

REQUESTS = {
    "Hello": lambda: Hello(call=1, protocol_version=PROTOCOL_VERSION, driver_id=new_driver_id()),
    "GetStatus": lambda: lc.GetStatus(call=1),
    "CheckHealth": lambda: CheckHealth(call=1),
}
AT_ONCE = 10
"""Messages sent on one connection before the next one's."""


def flood(sockets: list[zmq.Socket[bytes]], frame: bytes) -> None:
    """Send and receive without end."""
    while True:
        for socket in sockets:
            try:
                for _ in range(AT_ONCE):
                    socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                pass
            while socket.poll(0):
                socket.recv()
        time.sleep(0.0005)


def main() -> None:
    """Run it until it is killed."""
    keys, endpoint, request, connections = sys.argv[1:]
    own = read_secret_key(Path(keys) / "observer.key", "test")
    daemon = read_secret_key(Path(keys) / "daemon.key", "test")
    context, sockets = zmq.Context(), []
    for _ in range(int(connections)):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.curve_publickey = own.public_key.encode()
        socket.curve_secretkey = own.secret_key.encode()
        socket.curve_serverkey = daemon.public_key.encode()
        socket.connect(endpoint)
        sockets.append(socket)
    flood(sockets, encode_control(REQUESTS[request]()))


if __name__ == "__main__":
    main()

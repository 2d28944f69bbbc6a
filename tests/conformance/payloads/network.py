"""What of the network is there, and what of it can be reached."""

import json
import os
import socket


def error_of(attempt):
    try:
        attempt()
    except OSError as error:
        return error.errno
    return 0


def connect(family, address):
    with socket.socket(family) as connection:
        connection.connect(address)


def loopback():
    with socket.socket() as listener, socket.socket() as connection:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        connection.connect(listener.getsockname())
        return True


def lines(path, skip):
    return open(path).read().splitlines()[skip:]


print(
    json.dumps(
        {
            "interfaces": [line.split(":")[0].strip() for line in lines("/proc/net/dev", 2)],
            "routes": lines("/proc/net/route", 1),
            "routes6": [line.split()[-1] for line in lines("/proc/net/ipv6_route", 0)],
            "loopback works": loopback(),
            "errors": {
                "vsock": error_of(lambda: socket.socket(40, socket.SOCK_STREAM)),
                "packet": error_of(lambda: socket.socket(17, socket.SOCK_RAW)),
                "bluetooth": error_of(lambda: socket.socket(31, socket.SOCK_STREAM)),
                "alg": error_of(lambda: socket.socket(38, socket.SOCK_SEQPACKET)),
                "xdp": error_of(lambda: socket.socket(44, socket.SOCK_RAW)),
                "tipc pair": error_of(lambda: socket.socketpair(30, socket.SOCK_SEQPACKET)),
                "raw": error_of(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)),
                "outside": error_of(lambda: connect(socket.AF_INET, ("192.0.2.1", 80))),
                "abstract": error_of(lambda: connect(socket.AF_UNIX, "\0" + os.environ["ABSTRACT"])),
            },
        }
    )
)

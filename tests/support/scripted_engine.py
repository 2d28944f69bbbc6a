"""An engine that does what each request asks of it. Runs in a sandbox, with nothing but the standard library.

    scripted_engine.py SOCKET MODE

SOCKET is the path of a unix socket, or a TCP port on the loopback interface.
MODE is `serve`; `shut`, which closes every connection at once; or `deaf`, which listens and never accepts.
The body of a request is JSON: `do` names what to do, `key` under what to remember what became of it; the
request {"do": "report", "key": …} tells. Times are CLOCK_MONOTONIC, the machine's.
"""

import json
import os
import select
import socket
import sys
import threading
import time

STATUS = {200: "OK", 500: "Internal Server Error", 503: "Service Unavailable"}
memory = {}


def answer(connection, body, status=200, kind="application/json"):
    head = (
        f"HTTP/1.1 {status} {STATUS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)


def begin_chunked(connection, kind="text/event-stream"):
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.sendall(head.encode())


def chunk(connection, data):
    connection.sendall(b"%x\r\n%s\r\n" % (len(data), data))


def pattern(count):
    return bytes(range(256)) * (count // 256) + bytes(range(count % 256))


def until_closed(connection, seconds=60.0):
    """Wait for the other side to close; when it did."""
    poller = select.poll()
    poller.register(connection, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    poller.poll(seconds * 1000)
    return time.monotonic()


class Actions:
    """One method for each value of `do`."""

    def json(self, connection, request, head):
        answer(connection, json.dumps({"echo": request}).encode())

    def head(self, connection, request, head):
        answer(connection, json.dumps({"head": head.decode("latin-1")}).encode())

    def report(self, connection, request, head):
        answer(connection, json.dumps(memory.get(request["key"], {})).encode())

    def events(self, connection, request, head):
        begin_chunked(connection)
        for number in range(request["count"]):
            chunk(connection, b"data: %d\n\n" % number)
            time.sleep(request.get("pause", 0))
        connection.sendall(b"0\r\n\r\n")

    def trickle(self, connection, request, head):
        """A stream of one byte at a time."""
        begin_chunked(connection)
        for byte in request["text"].encode():
            chunk(connection, bytes((byte,)))
        connection.sendall(b"0\r\n\r\n")

    def length(self, connection, request, head):
        answer(connection, pattern(request["bytes"]), kind="application/octet-stream")

    def close_delimited(self, connection, request, head):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
        connection.sendall(pattern(request["bytes"]))

    def big_event(self, connection, request, head):
        begin_chunked(connection)
        chunk(connection, b"data: " + b"x" * request["bytes"] + b"\n\n")
        connection.sendall(b"0\r\n\r\n")

    def status(self, connection, request, head):
        answer(connection, b'{"error": "scripted"}', request["status"])

    def raw(self, connection, request, head):
        """Exactly these bytes, then the end."""
        connection.sendall(request["text"].encode("latin-1"))

    def long_head(self, connection, request, head):
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        for number in range(request["bytes"] // 1024):
            connection.sendall(b"X-%06d: %s\r\n" % (number, b"x" * 1010))
        connection.sendall(b"Content-Length: 2\r\n\r\nok")

    def endless_trailer(self, connection, request, head):
        begin_chunked(connection)
        chunk(connection, b"data: 1\n\n")
        connection.sendall(b"0\r\nX-Trailer: ")
        self._pour(connection, request["key"], 64 << 20)

    def stop_inside(self, connection, request, head):
        """Close in the middle of a body that was promised whole."""
        if request["framing"] == "length":
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        else:
            begin_chunked(connection)
            chunk(connection, b"data: 1\n\n")
            connection.sendall(b"20\r\ndata: ha")

    def hang(self, connection, request, head):
        """Nothing, until the other side closes."""
        memory[request["key"]] = {"began": time.monotonic()}
        memory[request["key"]]["closed"] = until_closed(connection)

    def hang_in_stream(self, connection, request, head):
        begin_chunked(connection)
        chunk(connection, b"data: 1\n\n")
        self.hang(connection, request, head)

    def pour(self, connection, request, head):
        """More than anyone reads; how far it came is remembered."""
        begin_chunked(connection)
        self._pour(connection, request["key"], request["bytes"])

    def _pour(self, connection, key, total):
        memory[key] = {"sent": 0}
        block = b"%x\r\n%s\r\n" % (16384, b"x" * 16384)
        try:
            while memory[key]["sent"] < total:
                connection.sendall(block)
                memory[key]["sent"] += len(block)
        finally:
            memory[key]["closed"] = time.monotonic()

    def leave(self, connection, request, head):
        """Answer whole, then exit at once."""
        answer(connection, pattern(request["bytes"]))
        os._exit(request.get("status", 0))

    def exit(self, connection, request, head):
        print(request.get("words", ""), flush=True)
        os._exit(request["status"])

    def eat(self, connection, request, head):
        """All the memory."""
        print("hungry", flush=True)
        print(len(b"x" * (1 << 30)))


def read_request(connection):
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return None, None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    (length,) = (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line[:15] == b"Content-Length:")
    while len(body) < length:
        body += connection.recv(65536)
    return head, body


def serve(connection):
    with connection:
        try:
            head, body = read_request(connection)
            if head is not None:
                request = json.loads(body)
                getattr(Actions(), request["do"])(connection, request, head)
        except OSError:
            pass


def main():
    path, mode = sys.argv[1:]
    threading.stack_size(256 << 10)
    if path.isdigit():
        listener = socket.socket()
        listener.bind(("127.0.0.1", int(path)))
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
    listener.listen(1 if mode == "deaf" else 256)
    print("listening", flush=True)
    if mode == "deaf":
        time.sleep(600)
    while True:
        connection, _ = listener.accept()
        if mode == "shut":
            connection.close()
        else:
            threading.Thread(target=serve, args=(connection,), daemon=True).start()


main()

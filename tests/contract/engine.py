"""An engine of the OpenAI shapes that does what a request asks of it. Runs in a sandbox on Python alone.

    engine.py SOCKET

`do` in a request's body says what to do, `key` under what to count it: {"do": "report"} tells what was seen of every
key, `usage` what the answer counts. A client that adds nothing to a body says all this as its last message, in JSON.
Each request with a key is also said on standard output, so that the attempt's log has it after the engine ended.
"""

import base64
import json
import os
import select
import socket
import struct
import sys
import threading
import time

STREAM = "text/event-stream"
memory = {}
turn = threading.Lock()
alive = []  # of each request, whether it only asked for a sign of life


def head(connection, kind, length=None):
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{framing}\r\n\r\n".encode())


def answer(connection, document):
    body = json.dumps(document).encode()
    head(connection, "application/json", len(body))
    connection.sendall(body)


def event(connection, data):
    event = f"data: {data}\n\n".encode()
    connection.sendall(b"%x\r\n%s\r\n" % (len(event), event))


def piece(request, text, finish=None):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    chunk = {"object": "chat.completion.chunk", "model": request["model"], "choices": [choice]}
    return json.dumps({"id": "chatcmpl-1", "created": 1, **chunk})


def vector(request):
    """An embedding, in base64 for who asks so: OpenAI's clients do, and some take nothing else then."""
    floats = [0.5, 0.25]
    if request.get("encoding_format") == "base64":
        return base64.b64encode(struct.pack("<2f", *floats)).decode()
    return floats


def inputs(request):
    """How many texts there are: a list of numbers is the tokens of one."""
    given = request["input"]
    return len(given) if isinstance(given, list) and not isinstance(given[0], int) else 1


def instructions(request):
    """What the last message says to do, if it is a JSON object."""
    try:
        said = json.loads(request["messages"][-1]["content"])
    except (KeyError, IndexError, TypeError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


class Actions:
    """One method for each value of `do`."""

    def speak(self, connection, request, seen):
        if "input" in request:
            one = {"object": "embedding", "embedding": vector(request)}
            data = [{**one, "index": index} for index in range(inputs(request))]
            answer(connection, {"object": "list", "model": request["model"], "data": data})
        elif request.get("stream"):
            head(connection, STREAM)
            event(connection, piece(request, "hello"))
            event(connection, piece(request, " there", "stop"))
            event(connection, "[DONE]")
            connection.sendall(b"0\r\n\r\n")
        else:
            message = {"role": "assistant", "content": "hello there"}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            document = {"object": "chat.completion", "model": request["model"], "choices": choices}
            counted = {"usage": request["usage"]} if "usage" in request else {}
            answer(connection, {"id": "chatcmpl-1", "created": 1, **document, **counted})

    def alive(self, connection, request, seen):
        """The answer to a GET."""
        answer(connection, {})

    def wedge(self, connection, request, seen):
        """From now on every request but the question whether it lives waits for ever."""
        memory["wedged"] = True
        self.hang(connection, {}, seen)

    def occupy(self, connection, request, seen):
        """Work that nothing else is done beside, without a word until it is over."""
        with turn:
            time.sleep(request["seconds"])
        self.speak(connection, request, seen)

    def die(self, connection, request, seen):
        print(request.get("words", "dying"), flush=True)
        os._exit(3)

    def hang(self, connection, request, seen):
        """Say nothing (or, streaming, one event) until the other side closes."""
        if request.get("stream"):
            head(connection, STREAM)
            event(connection, piece(request, "hello"))
        poller = select.poll()
        poller.register(connection, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        poller.poll()

    def pour(self, connection, request, seen):
        """Events without end; how many bytes they had is counted."""
        head(connection, STREAM)
        text = "x" * 4096
        while True:
            event(connection, piece(request, text))
            seen["poured"] = seen.get("poured", 0) + len(text)

    def fork(self, connection, request, seen):
        """Run a script in a process of its own, and say nothing."""
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-IBc", request["script"]])
        self.hang(connection, request, seen)

    def hoard(self, connection, request, seen):
        """Take memory without end."""
        taken = []
        while True:
            taken.append(bytearray(16 << 20))

    def raw(self, connection, request, seen):
        """These bytes (numbers are pauses, seconds), then a close, nothing until the other side closes, or death."""
        for piece in request["pieces"]:
            if isinstance(piece, str):
                connection.sendall(piece.encode("latin-1"))
            else:
                time.sleep(piece)
        if request.get("end") == "hang":
            self.hang(connection, {}, seen)
        elif request.get("end") == "die":
            self.die(connection, request, seen)

    def giant(self, connection, request, seen):
        """A stream whose first event has a text of so many bytes."""
        head(connection, STREAM)
        event(connection, piece(request, "x" * request["bytes"], "stop"))
        event(connection, "[DONE]")
        connection.sendall(b"0\r\n\r\n")

    def echo(self, connection, request, seen):
        """The request's body, as it came."""
        answer(connection, {"body": request["text"]})

    def headers(self, connection, request, seen):
        answer(connection, {"headers": request["headers"]})

    def report(self, connection, request, seen):
        with open("/proc/net/dev") as lines:
            interfaces = [line.split(":")[0].strip() for line in lines if ":" in line]
        call = json.loads(os.environ.get("ADAPTER_CALL", "null"))
        told = {"seen": memory, "interfaces": interfaces, "call": call, "alive": alive.count(True)}
        answer(connection, {**told, "requests": alive.count(False)})


def read_request(connection):
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    (length,) = (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line[:15] == b"Content-Length:")
    while len(body) < length:
        body += connection.recv(65536)
    request = json.loads(body or b'{"do": "alive"}')
    if request.get("do") == "headers":
        lines = [line.split(b":", 1) for line in head.split(b"\r\n")[1:]]
        request["headers"] = {name.decode().lower(): value.decode().strip() for name, value in lines}
    elif request.get("do") == "echo":
        request["text"] = body.decode()
    return request


def serve(connection):
    with connection:
        request = read_request(connection)
        if request is None:
            return
        request = {**instructions(request), **request}
        key, seen = request.get("key"), {}
        if key is not None:
            seen = memory.setdefault(key, {"times": 0, "closed": 0})
            seen["times"] += 1
            print(f"request {key}", flush=True)
        try:
            action = request.get("do", "speak")
            alive.append(action == "alive")
            if memory.get("wedged") and action != "alive":
                action = "hang"
            elif action == "speak":
                with turn:
                    pass
            getattr(Actions(), action)(connection, request, seen)
        except OSError:
            pass  # the other side closed
        finally:
            seen["closed"] = seen.get("closed", 0) + 1


def main():
    threading.stack_size(256 << 10)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(64)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


main()

"""A stand-in for an engine that takes its model over its own API, as Ollama does. Runs in a sandbox, with nothing but
the standard library.

    native_engine.py PORT MODE

It listens on TCP alone, refuses a Host that is not local, takes blobs by their digest and checks them, and creates a
model only from blobs that it has. GET /seen tells what was asked of it, over the endpoint that a test admits for it
as POST. MODE is `serve`; `slow`, which reads bodies slowly; `stuck`, which stops reading after a while; `full`, which
refuses every blob before it has read it; `lossy`, which closes in the middle of a blob; `odd`, whose answers never end.
"""

import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

blobs, models, seen = {}, {}, []
mode = sys.argv[2]


class Engine(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def answer(self, status, document=None):
        body = b"" if document is None else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def local(self):
        headers = {name.lower(): value for name, value in self.headers.items()}
        if self.path != "/seen":
            seen.append([self.command, self.path, headers])
        if self.headers["Host"] not in ("localhost", "127.0.0.1"):
            self.answer(403, {"error": "host"})
            return False
        return True

    def do_HEAD(self):
        if self.local():
            digest = self.path.removeprefix("/api/blobs/")
            if digest in blobs:
                self.send_response(200)
                self.send_header("Content-Length", "5")  # of the body that an answer to HEAD does not have
                self.end_headers()
            else:
                self.send_response(404)
                self.end_headers()

    def do_POST(self):
        if not self.local():
            return
        if self.path.startswith("/api/blobs/"):
            self.take_blob(self.path.removeprefix("/api/blobs/"))
            return
        document = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"null")
        if self.path == "/seen":
            self.answer(200, {"seen": seen, "models": models, "blobs": blobs})
        elif self.path == "/api/create":
            self.create(document)
        elif document["model"] not in models:
            self.answer(404, {"error": f"model '{document['model']}' not found"})
        else:
            self.answer(200, {"model": document["model"], "choices": [{"message": {"content": "hello"}}]})

    def take_blob(self, digest):
        left, total = int(self.headers["Content-Length"]), hashlib.sha256()
        count = left
        if mode == "full":
            self.answer(507, {"error": "no space left on device"})
            self.close_connection = True
            return
        while left:
            if mode == "slow":
                time.sleep(0.01)
            if mode == "stuck" and left < count // 2:
                time.sleep(600)
            if mode == "lossy" and left < count // 2:
                self.close_connection = True
                self.connection.close()
                return
            data = self.rfile.read(min(left, 65536))
            if not data:
                seen.append(["cut", digest, {"after": count - left}])
                return
            total.update(data)
            left -= len(data)
        if f"sha256:{total.hexdigest()}" != digest:
            self.answer(400, {"error": "digest mismatch"})
            return
        blobs[digest] = count
        self.answer(201)

    def create(self, document):
        if mode == "odd":
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 30))
            self.end_headers()
            while True:
                self.wfile.write(b"x" * 65536)
        missing = [digest for digest in document["files"].values() if digest not in blobs]
        if missing or set(document) != {"model", "files", "stream"} or document["stream"]:
            self.answer(400, {"error": f"not created: {missing or sorted(document)}"})
            return
        models[document["model"]] = document["files"]
        self.answer(200, {"status": "success"})


threading.stack_size(256 << 10)
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Engine)
server.daemon_threads = True
print("listening", flush=True)
server.serve_forever()

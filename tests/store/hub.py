"""A stand-in for the hub's HTTP interface, for one data set, on this machine's loopback address."""

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def serving(name, files):
    """Serves data set ``name`` of ``files`` (path -> bytes); gives its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(name, files))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(name, files):
    info = {
        "id": name,
        "sha": SHA,
        "private": False,
        "tags": [],
        "siblings": [{"rfilename": f} for f in files],
    }
    entries = [
        {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        for path, content in files.items()
    ]

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer()

        def do_GET(self):
            self.answer()

        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.answer()

        def answer(self):
            path = unquote(urlsplit(self.path).path)
            api, resolve = f"/api/datasets/{name}", f"/datasets/{name}/resolve/"
            if path.startswith(resolve) and (found := path.removeprefix(resolve).partition("/")[2]) in files:
                self.send(200, files[found], ETag=f'"{hashlib.sha1(files[found]).hexdigest()}"')
            elif path == api or path.startswith(f"{api}/revision/"):
                self.send(200, json.dumps(info).encode())
            elif path.startswith(f"{api}/tree/"):
                inside = path.removeprefix(f"{api}/tree/").partition("/")[2]
                self.send(200, json.dumps(entries if not inside else []).encode())
            elif path.startswith(f"{api}/paths-info/"):
                self.send(200, json.dumps(entries).encode())
            else:
                self.send(404, b"{}", **{"X-Error-Code": "EntryNotFound"})

        def send(self, status, body, **headers):
            self.send_response(status)
            for key, value in ({"X-Repo-Commit": SHA, "Content-Length": str(len(body))} | headers).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    return Handler

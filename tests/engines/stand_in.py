"""A server for tests: answers what it is told to, prints, and ends when asked."""

import argparse
import http.server
import json
import os
import subprocess
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--dies", default="")
parser.add_argument("--note", default="")
given = parser.parse_args()
print("\n".join(f"line {number}" for number in range(40)), flush=True)
if given.dies:
    print(given.dies, flush=True)
    sys.exit(3)
# A worker, which outlives its parent.
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if given.note:
    with open(given.note, "w") as note:
        note.write(f"{os.getpid()} {worker.pid}")


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self._answer(200, {"path": self.path})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/end":
            print("the end", flush=True)
            os._exit(4)
        if self.path == "/fail":
            print("the end", flush=True)
            self._answer(500, {"error": {"message": "see the log"}})
            self.wfile.flush()
            os._exit(4)
        if self.path == "/empty":
            self._answer(200, None)
        else:
            self._answer(*(200, asked) if asked.get("good") else (400, {"error": {"message": "too long"}}))

    def _answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b"" if body is None else json.dumps(body).encode())

    def log_message(self, *args):
        pass


http.server.HTTPServer((given.host, given.port), Answers).serve_forever()

"""JSON over HTTP between the tasks of a group, by host name."""

import json
import os
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT = 8790
GROUP = os.environ["SKYPILOT_JOBGROUP_NAME"]


def ask(task, path, message=None):
    """POST to the task's first node, and its answer."""
    url = "http://%s-0.%s:%d/%s" % (task, GROUP, PORT, path)
    with urllib.request.urlopen(url, json.dumps(message).encode(), timeout=30) as answer:
        return json.load(answer)


def serve(**functions):
    """Answer /<name> with what functions[name] makes of the message; for ever."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps(functions[self.path[1:]](message)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("", PORT), Handler)
    print("serving", ", ".join(functions), flush=True)
    server.serve_forever()

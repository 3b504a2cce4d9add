"""A server on the loopback address that serves files in the layout of the Hugging Face hub."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40


class Hub:
    """files: {"owner/name/file": bytes}. token: None: everybody may read. cut: bytes of a file
    after which the connection ends; None: never. lies: {name: SHA-256 that the hub claims}.
    revision: of the listing. commit: of the files."""

    def __init__(self, files: dict[str, bytes]):
        self.files, self.token, self.cut, self.lies = files, None, None, {}
        self.revision = self.commit = COMMIT
        self.asked: list[str] = []

    def listing(self, repository: str) -> dict | None:
        names = [n for n in self.files if n.startswith(repository + "/")]
        if not names:
            return None
        siblings = []
        for name in names:
            data, short = self.files[name], name.removeprefix(repository + "/")
            lfs = {"sha256": self.digest(name), "size": len(data), "pointerSize": 134}
            siblings.append({"rfilename": short, "size": len(data), "lfs": lfs})
        return {"id": repository, "sha": self.revision, "siblings": siblings}

    def tree(self, repository: str) -> list[dict]:
        return [
            {
                "type": "file",
                "path": file["rfilename"],
                "oid": "0" * 40,
                "size": file["size"],
                "lfs": {**file["lfs"], "oid": file["lfs"]["sha256"]},
            }
            for file in self.listing(repository)["siblings"]
        ]

    def digest(self, name: str) -> str:
        return self.lies.get(name) or hashlib.sha256(self.files[name]).hexdigest()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            hub.asked.append(f"{self.command} {self.path}")
            path = self.path.split("?")[0]
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self.answer(401, {"error": "Invalid username or password."}, "RepoNotFound")
            if path.startswith("/api/models/"):
                name = "/".join(path.split("/")[3:5])
                if "/tree/" in path:
                    return self.answer(200, hub.tree(name), "")
                found = hub.listing(name)
                return self.answer(200 if found else 404, found or {}, "RepoNotFound")
            owner, name, _, _, *rest = path.split("/")[1:]
            key = "/".join([owner, name, *rest])
            if key not in hub.files:
                return self.answer(404, {}, "EntryNotFound")
            self.send_file(key)

        def answer(self, status: int, content: dict | list, code: str) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            if status != 200:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def send_file(self, key: str) -> None:
            data, wanted = hub.files[key], self.headers.get("Range")
            start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
            self.send_response(206 if wanted else 200)
            self.send_header("X-Repo-Commit", hub.commit)
            self.send_header("ETag", f'"{hub.digest(key)}"')
            self.send_header("Content-Length", str(len(data) - start))
            self.send_header("Accept-Ranges", "bytes")
            if wanted:
                last = len(data) - 1
                self.send_header("Content-Range", f"bytes {start}-{last}/{len(data)}")
            self.end_headers()
            if self.command == "GET":
                part = data[start:]
                self.wfile.write(part if hub.cut is None else part[: hub.cut])
                if hub.cut is not None and hub.cut < len(part):
                    self.close_connection = True
                    self.connection.close()

    return Handler


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """Serve a hub; gives its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

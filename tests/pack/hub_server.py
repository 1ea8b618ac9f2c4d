"""A stand-in for the Hub on localhost: enough of its API to list a repository and serve ranges."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

REPOSITORY = "someone/Tiny-exl3"


@dataclass
class Hub:
    """What the server serves and what it has seen.

    Attributes:
        branches: branch name to folder; the commit of a branch is derived from its name.
        misbehave: how to answer range requests wrongly: ``whole`` (status 200), ``short``, ``shifted``, ``no range``.
        failures: how many requests for files are answered with 503 first.
        redirect: send files from another path, as the Hub's storage does.
        requests: method-less log of (path, range header). The client library asks for what is of no repository too,
            at its first request of a process: that is answered and not logged.
        sent: bytes of file contents sent.
        port: where it listens.
    """

    branches: dict[str, Path]
    misbehave: str = ""
    failures: int = 0
    redirect: bool = False
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    sent: int = 0
    port: int = 0

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT is to be."""
        return f"http://127.0.0.1:{self.port}"

    def commit(self, branch: str) -> str:
        """The commit that a branch points to."""
        return branch.encode().hex().ljust(40, "0")[:40]

    def folder(self, revision: str) -> Path | None:
        """The folder of a branch or commit."""
        for branch, folder in self.branches.items():
            if revision in (branch, self.commit(branch)):
                return folder
        return None

    def file_requests(self) -> list[tuple[str, str | None]]:
        """Requests for file contents."""
        return [(path, ranges) for path, ranges in self.requests if "/resolve/" in path or "/storage/" in path]


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serve until the context ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlparse(self.path).path)
            if REPOSITORY in path or path.startswith("/storage/"):
                hub.requests.append((path, self.headers.get("Range")))
            if match := re.fullmatch(rf"/api/models/{REPOSITORY}(?:/revision/(.+))?", path):
                self._info(match[1] or "main")
            elif path == f"/api/models/{REPOSITORY}/refs":
                branches = [
                    {"name": name, "ref": f"refs/heads/{name}", "targetCommit": hub.commit(name)}
                    for name in hub.branches
                ]
                self._json({"branches": branches, "tags": [], "converts": []})
            elif match := re.fullmatch(rf"/(?:{REPOSITORY}/resolve|storage)/([^/]+)/(.+)", path):
                self._file(match[1], match[2])
            else:
                self._error(404, "RepoNotFound")

        def _info(self, revision: str) -> None:
            folder = hub.folder(revision)
            if folder is None:
                return self._error(404, "RevisionNotFound")
            branch = next(name for name, other in hub.branches.items() if other == folder)
            names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
            siblings = [{"rfilename": name} for name in sorted(names)]
            return self._json({"id": REPOSITORY, "sha": hub.commit(branch), "siblings": siblings})

        def _file(self, revision: str, name: str) -> None:
            folder = hub.folder(revision)
            if folder is None or not (folder / name).is_file():
                return self._error(404, "EntryNotFound")
            if hub.failures:
                hub.failures -= 1
                return self._error(503, "")
            if hub.redirect and "/resolve/" in self.path:
                self.send_response(302)
                self.send_header("Location", f"/storage/{revision}/{name}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return None
            data = (folder / name).read_bytes()
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
            if match is None or hub.misbehave == "whole":
                return self._send(200, data, {})
            start, end = int(match[1]), min(int(match[2]), len(data) - 1)
            part = data[start : end + 1]
            shift = 1 if hub.misbehave == "shifted" else 0
            headers = {"Content-Range": f"bytes {start + shift}-{end + shift}/{len(data)}"}
            if hub.misbehave == "short":
                part = part[:-1]
            if hub.misbehave == "no range":
                headers = {}
            return self._send(206, part, headers)

        def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            try:
                self.wfile.write(data)
                hub.sent += len(data)
            except OSError:
                self.close_connection = True  # the reader has seen enough

        def _json(self, content: object) -> None:
            self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

        def _error(self, status: int, code: str) -> None:
            self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

        def log_message(self, format: str, *args: object) -> None:
            """Keep quiet."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, *args: object) -> None:
            """A reader that hangs up early is part of some tests."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

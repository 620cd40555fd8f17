"""A web server on this machine whose files can be cut off, changed, refused and redirected."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import sleep


@dataclass
class WebServer:
    """Files by path, and faults by path."""

    files: dict[str, bytes] = field(default_factory=dict)
    statuses: dict[str, list[int]] = field(default_factory=dict)  # answers before the file is sent
    cuts: dict[str, list[int]] = field(default_factory=dict)  # bytes after which an answer breaks, in order
    redirects: dict[str, str] = field(default_factory=dict)
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    etags: bool = True
    delay: float = 0.0  # seconds for each answer
    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)  # path and Range of each request

    def paths(self, path: str) -> list[str]:
        return [bytes_ for asked, bytes_ in self.requests if asked == path]


@contextmanager
def web_server() -> Iterator[WebServer]:
    served = WebServer()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": "0"} | headers | served.headers.get(self.path, {})).items():
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self) -> None:
            path = re.sub(r"^https?://[^/]+", "", self.path)  # a proxy is asked for the whole URL
            served.requests.append((self.path, self.headers.get("Range", "")))
            sleep(served.delay)
            if waiting := served.statuses.get(self.path):
                return self.answer(waiting.pop(0), {})
            if self.path in served.redirects:
                return self.answer(302, {"Location": served.redirects[self.path]})
            if path not in served.files:
                return self.answer(404, {})
            return self.send_file(served.files[path])

        def send_file(self, whole: bytes) -> None:
            etag = f'"{hash(whole)}"'
            headers = {"ETag": etag} if served.etags else {}
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            start = int(wanted[1]) if wanted and self.headers.get("If-Range") == etag else 0
            if start and start >= len(whole):
                return self.answer(416, headers)
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(whole) - 1}/{len(whole)}"
            self.answer(206 if start else 200, headers | {"Content-Length": str(len(whole) - start)})
            cuts = served.cuts.get(self.path)
            end = cuts.pop(0) if cuts else len(whole)
            with suppress(ConnectionError):  # a client may ask without reading
                self.wfile.write(whole[start:end])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""A server on this machine that answers as the Hugging Face hub does."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40


class Hub(ThreadingHTTPServer):
    """One repository at one revision.

    `claimed` overrides a file's digest in the listing. `spoiled` says how often a file is first sent with a wrong byte.
    `stalls` holds files whose first answer stops half-way and then says nothing. `on_file` is called with the name of
    each file whose content is asked for.
    """

    def __init__(self, files: dict[str, bytes], claimed=None, spoiled=None, stalls=(), on_file=None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.on_file = on_file or (lambda name: None)
        self.files, self.claimed, self.spoiled, self.stalls = files, claimed or {}, spoiled or {}, set(stalls)
        self.asked: list[tuple[str, str | None]] = []  # file, range
        self.stalled, self.release = threading.Event(), threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def listing(self, name: str) -> dict:
        """What the hub says of a file: large ones by SHA-256, JSON files by their git id."""
        data = self.files[name]
        if name.endswith(".json"):
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            return {"size": len(data), "blobId": self.claimed.get(name, blob)}
        digest = self.claimed.get(name, hashlib.sha256(data).hexdigest())
        return {"size": len(data), "lfs": {"sha256": digest, "size": len(data), "pointerSize": 134}}


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def answer(self, body: bool) -> None:
        hub, path = self.server, self.path.split("?")[0]
        if "owner/model" not in path:
            return self.missing("RepoNotFound")
        if COMMIT not in path:
            return self.missing("RevisionNotFound")
        if path.startswith("/api/models/"):
            siblings = [{"rfilename": name, **hub.listing(name)} for name in hub.files]
            return self.send(json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": siblings}).encode(), body)
        name = path.rpartition("/")[2]
        content = hub.files.get(name)
        if content is None:
            return self.missing("EntryNotFound")
        etag = hashlib.sha256(content).hexdigest()
        if body:
            hub.asked.append((name, self.headers.get("Range")))
            hub.on_file(name)
            if hub.spoiled.get(name, 0) > 0:
                hub.spoiled[name] -= 1
                content = b"?" + content[1:]
        self.send(content, body, name, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})

    def send(self, content: bytes, body: bool, name: str = "", headers: dict | None = None) -> None:
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        self.send_response(206 if asked else 200)
        for key, value in {**(headers or {}), "Content-Length": str(len(content) - start)}.items():
            self.send_header(key, value)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not body:
            return
        if name in self.server.stalls:
            self.server.stalls.discard(name)
            self.wfile.write(content[start : len(content) // 2])
            self.wfile.flush()
            self.server.stalled.set()
            self.server.release.wait(60)
            self.close_connection = True
            return
        self.wfile.write(content[start:])

    def log_message(self, *_):
        pass


def hub_environment(hub: Hub | None, home: Path) -> dict[str, str]:
    """What points the library at this server, or at nothing."""
    address = f"http://127.0.0.1:{hub.server_port if hub else 9}"
    return {"HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home)}

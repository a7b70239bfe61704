"""Archives and the hub. The hub is a server on this machine that answers as the hub does."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from yardstick.errors import YardstickError
from yardstick.retrieve.archive import download_archive, read_member
from yardstick.retrieve.hub import download_model

COMMIT = "a" * 40
DOWNLOAD = "import sys; from pathlib import Path; from yardstick.retrieve.hub import download_model as d; "
DOWNLOAD += "from yardstick.errors import YardstickError as E\n"
DOWNLOAD += "try: d('owner/model', sys.argv[1], Path(sys.argv[2]))\nexcept E as e: sys.exit(f'yardstick: {e}')"


class Hub(ThreadingHTTPServer):
    """One repository; `claimed` overrides a file's digest in the listing."""

    def __init__(self, files: dict[str, bytes], claimed: dict[str, str] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.claimed, self.asked = files, claimed or {}, []
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

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/owner/model"):
            files = {name: self.server.listing(name) for name in self.server.files}
            if "/tree/" in path:
                listing = [
                    {"type": "file", "path": name, "size": file["size"], "oid": file.get("blobId", "0" * 40)}
                    | ({"lfs": {"oid": file["lfs"]["sha256"], **file["lfs"]}} if "lfs" in file else {})
                    for name, file in files.items()
                ]
            else:
                siblings = [{"rfilename": name, **file} for name, file in files.items()]
                listing = {"id": "owner/model", "sha": COMMIT, "siblings": siblings}
            content = json.dumps(listing).encode()
            headers = {"Content-Type": "application/json"}
        else:
            name = path.rpartition("/")[2]
            if body:
                self.server.asked += [name] if name in self.server.files else []
            content = self.server.files.get(name)
            if content is None:
                self.send_error(404)
                return
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        self.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


def download(hub: Hub | None, folder: Path, revision: str = COMMIT) -> subprocess.CompletedProcess:
    """In a process of its own: the library reads the hub's address once."""
    address = f"http://127.0.0.1:{hub.server_port if hub else 9}"
    environment = os.environ | {"HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "home")}
    command = [sys.executable, "-c", DOWNLOAD, revision, str(folder / "model")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 50,
    "evil.py": b"boom",
    "pytorch_model.bin": b"x",
}


def test_hub_files_arrive_once_and_no_code_or_pickle(tmp_path):
    hub = Hub(FILES)
    assert download(hub, tmp_path).returncode == 0
    assert (tmp_path / "model/model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not (tmp_path / "model/evil.py").exists() and not (tmp_path / "model/pytorch_model.bin").exists()
    asked = list(hub.asked)
    assert download(hub, tmp_path).returncode == 0
    assert hub.asked == asked  # the second time nothing is fetched again


def test_hub_file_that_is_not_the_listed_one_is_refused(tmp_path):
    result = download(Hub(FILES, claimed={"model.safetensors": "0" * 64}), tmp_path)
    assert result.returncode == 1
    assert "yardstick: owner/model: model.safetensors: sha256 of" in result.stderr.splitlines()[-1]


def test_hub_small_file_that_is_not_the_listed_one_is_refused(tmp_path):
    result = download(Hub(FILES, claimed={"config.json": "0" * 40}), tmp_path)
    assert result.returncode == 1
    assert "yardstick: owner/model: config.json is not the file that the hub lists" in result.stderr


def test_hub_that_cannot_be_reached_is_one_line(tmp_path):
    result = download(None, tmp_path)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert f"yardstick: model owner/model@{COMMIT[:12]}: cannot be downloaded from the hub" in result.stderr


def test_a_branch_is_not_a_revision(tmp_path):
    with pytest.raises(YardstickError, match="revision main must be a full commit id"):
        download_model("owner/model", "main", tmp_path)


def write_archives(folder: Path) -> tuple[Path, Path]:
    wheel, sdist = folder / "p-1.0-py3-none-any.whl", folder / "p-1.0.tar.gz"
    with zipfile.ZipFile(wheel, "w") as bundle:
        bundle.writestr("p/text.txt", "hello")
    with tarfile.open(sdist, "w:gz") as bundle:
        entry = tarfile.TarInfo("p-1.0/text.txt")
        entry.size = 5
        bundle.addfile(entry, io.BytesIO(b"hello"))
    return wheel, sdist


def test_members_of_wheels_and_sdists(tmp_path):
    wheel, sdist = write_archives(tmp_path)
    assert read_member(wheel, "p/text.txt") == read_member(sdist, "p-1.0/text.txt") == b"hello"
    with pytest.raises(YardstickError, match="holds no member p/none.txt"):
        read_member(wheel, "p/none.txt")
    with pytest.raises(YardstickError, match="holds no member none.txt"):
        read_member(sdist, "none.txt")
    sdist.write_bytes(sdist.read_bytes()[:40])
    with pytest.raises(YardstickError, match="damaged archive"):
        read_member(sdist, "p-1.0/text.txt")


def test_cached_archive_with_the_pinned_digest_needs_no_network(tmp_path):
    wheel, _ = write_archives(tmp_path)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    folder = tmp_path / "cache" / f"p-1.0-{digest[:12]}"
    folder.mkdir(parents=True)
    wheel.rename(folder / wheel.name)
    assert download_archive("p", "1.0", digest, tmp_path / "cache") == folder / wheel.name


def test_sdist_is_fetched_without_running_its_setup(tmp_path):
    """A local index whose sdist has a setup.py that leaves a mark: the file arrives and the mark does not."""
    source, mark = tmp_path / "index", tmp_path / "mark"
    source.mkdir()
    with tarfile.open(source / "marked-1.0.tar.gz", "w:gz") as bundle:
        for name, data in {
            "setup.py": f"open({str(mark)!r}, 'w').write('ran')\nfrom setuptools import setup\nsetup(name='marked')\n",
            "PKG-INFO": "Metadata-Version: 2.1\nName: marked\nVersion: 1.0\n",
        }.items():
            entry = tarfile.TarInfo(f"marked-1.0/{name}")
            entry.size = len(data)
            bundle.addfile(entry, io.BytesIO(data.encode()))
    digest = hashlib.sha256((source / "marked-1.0.tar.gz").read_bytes()).hexdigest()
    code = (
        "import sys; from pathlib import Path; from yardstick.retrieve.archive import download_archive as d; "
        "print(d('marked', '1.0', sys.argv[1], Path(sys.argv[2])))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, digest, str(tmp_path / "cache")],
        env=os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(source)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).name == "marked-1.0.tar.gz"
    assert not mark.exists()

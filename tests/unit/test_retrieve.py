"""Archives and the hub. The hub is a server on this machine that answers as the hub does."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from tests.hub import COMMIT, Hub, hub_environment
from yardstick.cli.build_model import build_release
from yardstick.errors import YardstickError
from yardstick.retrieve import archive, release
from yardstick.retrieve.archive import download_archive, join_members, read_member
from yardstick.retrieve.hub import MODEL_FILES, download

DOWNLOAD = """
import json, sys
from pathlib import Path
from yardstick.errors import YardstickError
from yardstick.retrieve.hub import download
try:
    download("model x", *json.loads(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
except YardstickError as error:
    sys.exit(f"yardstick: {error}")
"""


def start_download(hub, folder, repository="owner/model", revision=COMMIT, patterns=MODEL_FILES, pins=None):
    """In a process of its own: the library reads the hub's address once."""
    environment = os.environ | hub_environment(hub, folder / "home")
    arguments = [json.dumps([repository, revision, patterns]), str(folder / "model"), json.dumps(pins)]
    return subprocess.Popen(
        [sys.executable, "-c", DOWNLOAD, *arguments], env=environment, text=True, stderr=subprocess.PIPE
    )


def run_download(*arguments, **settings) -> tuple[int, str]:
    process = start_download(*arguments, **settings)
    errors = process.communicate(timeout=200)[1]
    return process.returncode, errors


FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 50,
    "evil.py": b"boom",
    "pytorch_model.bin": b"x",
}


def test_a_connection_that_breaks_goes_on_by_itself(tmp_path):
    data = bytes(range(256)) * 80_000
    hub = Hub({"config.json": b"{}", "model.safetensors": data}, stalls=["model.safetensors"])
    hub.release.set()  # half of it, then the connection is closed
    assert run_download(hub, tmp_path)[0] == 0
    assert (tmp_path / "model/model.safetensors").read_bytes() == data
    first, second = [asked for name, asked in hub.asked if name == "model.safetensors"]
    assert first is None and len(data) // 2 - 2**20 <= int(second.removeprefix("bytes=").rstrip("-")) <= len(data) // 2
    assert not list(tmp_path.rglob(".part-*"))


def refusal(result: tuple[int, str]) -> str:
    """The one line of a refused download."""
    code, errors = result
    assert code == 1 and "Traceback" not in errors, errors[-2000:]
    lines = [line for line in errors.splitlines() if line.startswith("yardstick: ")]
    assert len(lines) == 1, errors
    return lines[0]


def test_hub_files_arrive_once_and_no_code_or_pickle(tmp_path):
    hub = Hub(FILES)
    assert run_download(hub, tmp_path)[0] == 0
    assert (tmp_path / "model/model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not (tmp_path / "model/evil.py").exists() and not (tmp_path / "model/pytorch_model.bin").exists()
    asked = list(hub.asked)
    assert run_download(hub, tmp_path)[0] == 0
    assert hub.asked == asked  # the second time nothing is fetched again


def test_hub_file_that_arrives_damaged_is_fetched_again_once(tmp_path):
    for name in ("model.safetensors", "config.json"):
        hub = Hub(FILES, spoiled={name: 1})
        assert run_download(hub, tmp_path / name)[0] == 0
        assert (tmp_path / name / "model" / name).read_bytes() == FILES[name]
        assert [asked for asked, _ in hub.asked].count(name) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_hub_file_that_stays_damaged_is_refused(tmp_path, name):
    hub = Hub(FILES, spoiled={name: 9})
    line = refusal(run_download(hub, tmp_path))
    assert f"owner/model@{COMMIT[:12]}: {name}: has " in line and "also when fetched again" in line
    assert [asked for asked, _ in hub.asked].count(name) == 2
    assert not (tmp_path / "model" / name).exists()


def test_hub_file_that_is_not_the_pinned_one_is_refused(tmp_path):
    line = refusal(run_download(Hub(FILES), tmp_path, pins={"model.safetensors": "0" * 64}))
    assert "model.safetensors: has sha256" in line and "the config pins 0000" in line


def test_a_pin_of_no_file_is_refused(tmp_path):
    line = refusal(run_download(Hub(FILES), tmp_path, pins={"weights.safetensors": "0" * 64}))
    assert "sha256 pins weights.safetensors, which is not among the files (config.json" in line


def test_a_killed_download_goes_on_where_it_stopped(tmp_path):
    data = bytes(range(256)) * 80_000  # 20 MB
    hub = Hub({"config.json": b"{}", "model.safetensors": data}, stalls=["model.safetensors"])
    process = start_download(hub, tmp_path)
    assert hub.stalled.wait(60)
    deadline = time.monotonic() + 30
    while not [p for p in tmp_path.rglob(".part-*") if p.stat().st_size >= 5_000_000]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.kill()
    process.wait()
    hub.release.set()
    assert run_download(hub, tmp_path)[0] == 0
    assert (tmp_path / "model/model.safetensors").read_bytes() == data
    ranges = [asked for name, asked in hub.asked if name == "model.safetensors"]
    assert len(ranges) == 2 and ranges[0] is None and int(ranges[1].removeprefix("bytes=").rstrip("-")) >= 5_000_000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repository": "owner/nothing"}, "the hub has no repository owner/nothing, or it is private or gated"),
        ({"revision": "b" * 40}, f"owner/model has no revision {'b' * 40}"),
        ({"patterns": ["config.json", "weights.gguf"]}, f"owner/model@{COMMIT[:12]} holds no file weights.gguf"),
        ({"patterns": ["*.gguf"]}, f"owner/model@{COMMIT[:12]} holds no file *.gguf"),
    ],
)
def test_hub_names_that_do_not_exist_are_one_line(tmp_path, settings, message):
    assert message in refusal(run_download(Hub(FILES), tmp_path, **settings))
    assert not (tmp_path / "model").exists()


def test_hub_listing_that_leads_out_of_the_folder_is_refused(tmp_path):
    line = refusal(run_download(Hub(FILES | {"../x.safetensors": b"x"}), tmp_path))
    assert "lists a file outside its folder (../x.safetensors)" in line


def test_hub_that_cannot_be_reached_is_one_line(tmp_path):
    line = refusal(run_download(None, tmp_path))
    assert f"owner/model@{COMMIT[:12]} cannot be downloaded from the hub" in line


def test_a_branch_is_not_a_revision(tmp_path):
    with pytest.raises(YardstickError, match="revision main must be a full commit id"):
        download("model x", "owner/model", "main", MODEL_FILES, tmp_path)


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


def write_parts(folder: Path, *contents: bytes) -> list[dict]:
    """Wheels of one member each, and the entries of `parts` that name them."""
    folder.mkdir()
    parts = []
    for number, data in enumerate(contents, 1):
        wheel = folder / f"part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as bundle:
            bundle.writestr(f"part{number}/data.bin", data)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        parts.append(
            {"package": f"part{number}", "version": "1.0", "sha256": digest, "member": f"part{number}/data.bin"}
        )
    return parts


def test_a_release_in_parts_is_joined_in_their_order_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    parts, fetched, asked = write_parts(tmp_path / "index", b"GGUF one ", b"two ", b"three"), [], []
    lost = {"part3"}

    def fetch(package, version, sha256, folder):
        fetched.append(package)
        if package in lost:
            raise YardstickError("the network is gone")
        folder.mkdir(parents=True)
        return (tmp_path / "index" / f"{package}-{version}-py3-none-any.whl").rename(folder / f"{package}.whl")

    monkeypatch.setattr(archive, "_pip_download", fetch)
    monkeypatch.setattr(release, "write_release", lambda path, *others: asked.append((path.read_bytes(), *others)))
    whole = hashlib.sha256(b"GGUF one two three").hexdigest()
    recipe = {"kind": "pypi_gguf", "parts": parts, "member_sha256": whole, "dither_seed": 3}
    with pytest.raises(YardstickError, match="the network is gone"):
        build_release(recipe, tmp_path / "model", tmp_path / "cache")
    assert not (tmp_path / "cache" / "members").exists()
    lost.clear()
    build_release(recipe, tmp_path / "model", tmp_path / "cache")
    assert fetched == ["part1", "part2", "part3", "part3"]
    assert asked == [(b"GGUF one two three", tmp_path / "model", 3, False)]
    # what the cache holds is checked again, part by part
    damaged = tmp_path / "cache" / f"part2-1.0-{parts[1]['sha256'][:12]}" / "part2.whl"
    damaged.write_bytes(b"something else")
    with pytest.raises(
        YardstickError, match="part2==1.0: sha256 of .*part2.whl is .*delete the file or correct the pin"
    ):
        build_release(recipe, tmp_path / "model", tmp_path / "cache")


def test_parts_that_join_to_another_file_are_refused(tmp_path):
    parts = write_parts(tmp_path / "index", b"one", b"two")
    found = [(tmp_path / "index" / f"{part['package']}-1.0-py3-none-any.whl", part["member"]) for part in parts]
    pinned = hashlib.sha256(b"onetwo").hexdigest()
    assert join_members(found, pinned, tmp_path / "a").read_bytes() == b"onetwo"
    with pytest.raises(YardstickError, match="part2/data.bin to part1/data.bin, joined: sha256 of"):
        join_members(found[::-1], pinned, tmp_path / "b")


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

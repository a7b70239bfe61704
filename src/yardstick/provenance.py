"""What a result depends on: the code files of its stage, package versions, digests of its inputs.

`stage_files` follows the static imports of a command-line module. Snakemake gets that list as `input: code=...`, and
the same list gives the code digest in every result, so "what makes this rerun" and "what this number was made by"
cannot drift apart. Methods that are chosen by name (RTN or GPTQ) are imported by name at run time, on purpose: an
edit of `gptq.py` then leaves RTN's results alone.
"""

import ast
import hashlib
import importlib.metadata
import platform
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE_ROOT = Path(__file__).parent
VERSIONED_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "transformers", "gguf", "libgguf", "pyarrow")


def _module_file(module: str) -> Path | None:
    """File of `yardstick.a.b`, or None where that name is not a module of ours."""
    parts = module.split(".")
    if parts[0] != "yardstick":
        return None
    base = PACKAGE_ROOT.joinpath(*parts[1:])
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@cache
def stage_files(*modules: str) -> tuple[str, ...]:
    """Absolute paths of `modules` and of every module of ours that they import, directly or not, sorted."""
    found: set[Path] = set()
    waiting = list(modules)
    while waiting:
        path = _module_file(waiting.pop())
        if path is not None and path not in found:
            found.add(path)
            waiting.extend(_imports(path))
    return tuple(sorted(str(path) for path in found))


def code_digest(*modules: str) -> str:
    """SHA-256 over the names and bytes of the stage's files."""
    digest = hashlib.sha256()
    for name in stage_files(*modules):
        path = Path(name)
        digest.update(path.relative_to(PACKAGE_ROOT).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a number."""
    versions = {"python": platform.python_version()}
    for name in VERSIONED_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def machine() -> dict[str, Any]:
    """The processor that made a result, as far as the system tells."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {"cpu": model, "system": f"{platform.system()} {platform.machine()}"}

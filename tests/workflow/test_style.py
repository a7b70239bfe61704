"""Formatting, lint, and that the README is true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def run(*command):
    return subprocess.run([str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "src", "tests", "bench"),
        ("ruff", "format", "--check", "src", "tests", "bench"),
        ("snakefmt", "--check", "workflow"),
    ],
    ids=["ruff-check", "ruff-format", "snakefmt"],
)
def test_formatting(command):
    result = run(*command)
    assert result.returncode == 0, result.stdout + result.stderr


def test_snakemake_lint_has_only_the_complaint_about_environments():
    """Steps run in the environment that the Makefile pins, so no rule names a conda environment or a container."""
    result = run("snakemake", "--lint")
    complaints = re.findall(r"^    \* (.*)$", result.stdout + result.stderr, flags=re.M)
    assert {c for c in complaints if "conda environment or container" not in c} == set()


def test_small_files():
    limits = {".py": 400, ".smk": 200}
    for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("workflow/**/*.smk")]:
        assert len(path.read_text().splitlines()) <= limits[path.suffix], path
    assert len((ROOT / "workflow/Snakefile").read_text().splitlines()) <= 60


def test_the_map_in_the_readme_is_the_tree():
    readme = (ROOT / "README.md").read_text()
    listing = re.search(r"```text\n(.*?)```", readme, flags=re.S).group(1)
    parents: list[str] = []
    named = set()
    for line in listing.splitlines():
        entry = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        parents[depth:] = [entry.rstrip("/")]
        path = "/".join(parents)
        named.add(path)
        if not entry.startswith("<") and "<" not in path:
            assert (ROOT / path).exists(), f"README names {path}, which is not there"
            assert (ROOT / path).is_dir() == entry.endswith("/"), path
    for folder in sorted((ROOT / "src/yardstick").iterdir()):
        if folder.is_dir() and not folder.name.startswith("__"):
            assert f"src/yardstick/{folder.name}" in named, f"README's map lacks {folder.name}"


def test_the_commands_in_the_readme_are_true():
    readme = (ROOT / "README.md").read_text()
    commands = [line for block in re.findall(r"```sh\n(.*?)```", readme, flags=re.S) for line in block.splitlines()]
    commands = [line.split("#")[0].strip() for line in commands if line.strip() and not line.startswith("#")]
    makefile = (ROOT / "Makefile").read_text()
    checked = 0
    for line in commands:
        words = line.split()
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, flags=re.M), line
            checked += 1
        elif words[0] == "snakemake":
            result = run(*words, "--dry-run")
            assert result.returncode == 0, line + result.stderr[-2000:]
            checked += 1
        elif words[:2] == ["python", "-m"]:
            assert run("python", "-m", words[2], "--help").returncode == 0, line
            checked += 1
    assert checked >= 4
    assert {"make table", "make test"} <= set(commands)


def test_every_key_of_the_schema_is_documented():
    text = (ROOT / "config/README.md").read_text()
    schema = yaml.safe_load((ROOT / "workflow/schemas/config.schema.yaml").read_text())

    def keys(node):
        if isinstance(node, dict):
            for name, rule in node.get("properties", {}).items():
                yield name
                yield from keys(rule)
            for key, value in node.items():
                if key != "properties":
                    yield from keys(value)
        elif isinstance(node, list):
            for item in node:
                yield from keys(item)

    missing = {name for name in keys(schema) if f"`{name}`" not in text}
    assert not missing


def test_nothing_pickled_is_loaded_and_no_remote_code_is_run():
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        assert "allow_pickle=True" not in text and "import pickle" not in text, path
        assert "trust_remote_code=True" not in text, path
        for call in re.findall(r"torch\.load\(.*", text):
            assert "weights_only=True" in call, path

"""A mini experiment in a copy of the repository, where tests may edit code and config."""

import copy
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]


def mini_config(model: Path, hybrid: Path | None = None) -> dict:
    """A llama with all kinds of rows, and where asked for a qwen3_5, of which llama.cpp's files are not written yet."""
    models = {"tiny": {"kind": "local", "path": str(model)}}
    if hybrid:
        models["hybrid"] = {"kind": "local", "path": str(hybrid)}

    def text(key, count, seed):
        source = {"kind": "synthetic", "problems": 60, "seed": seed}
        return {key: count, "licence": "MIT", "source": source}

    texts = {"math": text("chunks", 3, 1), "more": text("chunks", 2, 3)}
    texts["own"] = {"chunks": 2, "licence": "MIT", "source": {"kind": "generated", "seed": 5}}
    return {
        "models": models,
        "corpora": {
            "evaluation": {"length": 64, "texts": texts},
            "calibration": {"length": 32, "texts": {"math": text("sequences", 16, 2)}},
        },
        "evaluation": {"batch_chunks": 2},
        "variants": {
            "rtn-g32": {"method": "rtn", "group_size": 32},
            "gptq-g32": {"method": "gptq", "group_size": 32, "mse": True},
        },
        "rivals": {
            "gguf-q8_0": {"kind": "gguf", "mix": "Q8_0", "models": ["tiny"]},
            "gguf-iq4_xs": {"kind": "gguf", "mix": "IQ4_XS", "imatrix": True, "models": ["tiny"]},
        },
        "baseline": "gptq-g32",
        "bar": "gguf-iq4_xs",
    }


@dataclass
class Tree:
    """A copy of workflow and sources, a config of its own, and a way to run snakemake in it."""

    folder: Path
    config: dict
    extra: dict = field(default_factory=dict)  # environment variables

    def write_config(self) -> None:
        (self.folder / "config" / "config.yaml").write_text(yaml.safe_dump(self.config))

    @property
    def environment(self) -> dict:
        return os.environ | {"PYTHONPATH": str(self.folder / "src")} | self.extra

    def command(self, *arguments: str) -> list[str]:
        return [str(Path(sys.executable).parent / "snakemake"), "-j1", *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(*arguments), cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=900
        )

    def must_run(self, *arguments: str) -> subprocess.CompletedProcess:
        result = self.run(*arguments)
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
        return result

    def planned(self) -> set[str]:
        """Messages of the jobs that a dry run would start."""
        return set(re.findall(r"^Job \d+: (.*)$", self.must_run("-n").stdout, flags=re.M))

    def results(self) -> dict[str, bytes]:
        """Bytes of all that must come out the same."""
        found = {}
        for pattern in (
            "table.md",
            "*/*/summary.json",
            "*/*/positions.parquet",
            "*/*/checkpoint/*.safetensors",
        ):
            for path in sorted((self.folder / "results" / "quality").glob(pattern)):
                found[str(path.relative_to(self.folder))] = path.read_bytes()
        return found


def make_tree(folder: Path, model: Path, hybrid: Path | None = None) -> Tree:
    for name in ("workflow", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (folder / "config").mkdir()
    tree = Tree(folder, mini_config(model, hybrid))
    tree.write_config()
    return tree


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("mini") / "model", "llama", tied=True)


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory) -> Path:
    """Three delta layers and one of attention, n_k != n_v."""
    return write_tiny_model(tmp_path_factory.mktemp("mini") / "hybrid", "qwen3_5", tied=False, layers=4)


@pytest.fixture(scope="session")
def finished_tree(tmp_path_factory, tiny_model, hybrid_model) -> Tree:
    """The mini experiment of both models, run to its end once; tests copy it before they change it."""
    tree = make_tree(tmp_path_factory.mktemp("finished"), tiny_model, hybrid_model)
    tree.must_run()
    return tree


@pytest.fixture
def tree(tmp_path, finished_tree) -> Tree:
    """A finished tree of the test's own."""
    shutil.copytree(finished_tree.folder, tmp_path / "tree", symlinks=True)  # keeps times of change
    return Tree(tmp_path / "tree", copy.deepcopy(finished_tree.config))

"""Tiny models for tests: random weights, odd sizes, a tokenizer trained on our own problems."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():  # no NVIDIA driver: kernels are interpreted
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import pytest
import torch

from tests.tiny import write_tiny_model

if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # one process a core, and so the steps that it starts: threads
    cores = sorted(os.sched_getaffinity(0))  # that wait for a core which the other process has cost more than they give
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items) -> None:
    """Tests of the finished mini experiment share a process, so that it is run once. They come first, then the other
    tests of whole workflows: what takes long must not be left to the end, when one process has nothing to do."""
    items.sort(key=lambda item: ("finished_tree" not in item.fixturenames, "workflow" not in item.path.parts))
    for item in items:
        if "finished_tree" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("mini-experiment"))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """A tied llama of two layers, hidden 96 (short last groups), 3 query heads on 1 key head."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", "llama", tied=True)


@pytest.fixture(autouse=True)
def repeatable():
    torch.manual_seed(0)

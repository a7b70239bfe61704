"""Tiny models for tests: random weights, odd sizes, a tokenizer trained on our own problems."""

from pathlib import Path

import pytest
import torch

from tests.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """A tied llama of two layers, hidden 96 (short last groups), 3 query heads on 1 key head."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", "llama", tied=True)


@pytest.fixture(autouse=True)
def repeatable():
    torch.manual_seed(0)

"""Fixtures: tiny seeded models on the CPU, alone, behind the backend, and in a folder with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from foredraft.backends.transformers import TransformersBackend
from tiny import tiny_llama, tiny_tokenizer

torch.set_num_threads(1)  # tiny models gain nothing from more

settings.register_profile("foredraft", deadline=None, derandomize=True)
settings.load_profile("foredraft")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--golden` writes the golden files anew, to be looked at with git."""
    parser.addoption("--golden", action="store_true", help="write the golden files anew")


@pytest.fixture(scope="session")
def tiny_target() -> Any:
    """A Llama of two layers and 64 tokens."""
    return tiny_llama(seed=1)


@pytest.fixture(scope="session")
def tiny_draft() -> Any:
    """A Llama of one layer and the same 64 tokens; it knows nothing of the target."""
    return tiny_llama(seed=2, layers=1)


@pytest.fixture(scope="session")
def target(tiny_target: Any) -> TransformersBackend:
    """The backend over `tiny_target`."""
    return TransformersBackend(tiny_target)


@pytest.fixture(scope="session")
def draft_backend(tiny_draft: Any) -> TransformersBackend:
    """The backend over `tiny_draft`."""
    return TransformersBackend(tiny_draft)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Byte-level BPE with ChatML."""
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def text_target(tokenizer: Any) -> TransformersBackend:
    """A target whose vocabulary is the tokenizer's."""
    return TransformersBackend(tiny_llama(seed=3, vocabulary=len(tokenizer)))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A folder as on the hub: a tiny model and its tokenizer, saved with `save_pretrained`."""
    folder = tmp_path_factory.mktemp("tiny model")  # a path with a space
    model = tiny_llama(seed=3, vocabulary=len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

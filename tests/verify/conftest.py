"""Fixtures: one thread, and a checkpoint of a tiny decoder."""

import pytest

from kvad.checkpoint.native import save_checkpoint
from kvad.text.simple_tokenizers import ByteTokenizer
from tests.support.verify_models import tiny_model


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Small tensors: a second thread takes more time than it saves."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("verify") / "model", ByteTokenizer()
    model = tiny_model(vocab=tokenizer.vocab_size)
    save_checkpoint(folder, model.config, model.state_dict(), tokenizer)
    return str(folder)

"""One server for all tests of this folder, with API keys and small limits; the same model in this process."""

import signal

import pytest

from tests.support.server import (
    THINKING_SPECIALS,
    THINKING_TEMPLATES,
    THINKING_TEXTS,
    ServerProcess,
    check_drain,
    make_tokenizer,
    write_model,
)  # fmt: skip

KEYS = ("the-first-api-key", "the-second-api-key")
MAX_SEQS = 8
LIMITS = {
    "max_body_bytes": 60_000, "max_prompts": 8, "max_prompt_tokens": 600, "max_prompt_chars": 4000, "max_messages": 6,
    "max_n": 4, "max_sequences": 16, "max_logprobs": 5, "max_echo_logprobs": 24_000,
    "max_stop": 4, "max_stop_chars": 32, "max_logit_bias": 16,
    "max_tools": 3, "max_schema_bytes": 1500, "max_queued_requests": 12, "max_queued_tokens": 3000,
    "max_large_texts": 2, "max_unread_tokens": 5000,
    "max_requests_per_key": 12, "max_sessions": 5, "max_session_bytes": 200_000,
    "request_seconds": 20.0, "header_seconds": 0.5, "body_seconds": 0.5,
}  # fmt: skip


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("server") / "model")


@pytest.fixture(scope="session")
def server(model, tmp_path_factory):
    limits = [f"--limit={name}={value}" for name, value in LIMITS.items()]
    sessions = tmp_path_factory.mktemp("sessions")
    options = ("--max-num-seqs", MAX_SEQS, "--session-dir", sessions, "--shutdown-timeout", 0.5)
    process = ServerProcess(model, *limits, *options, keys=KEYS)
    process.session_folder = sessions
    yield process
    check_drain(process)


@pytest.fixture(scope="session")
def thinker(tmp_path_factory):
    """Start a server of a model whose answers may begin with thoughts."""
    folder = tmp_path_factory.mktemp("thinker") / "model"
    tokenizer = make_tokenizer(THINKING_SPECIALS, THINKING_TEXTS)
    write_model(folder, tokenizer=tokenizer, templates=THINKING_TEMPLATES)
    process = ServerProcess(folder, "--limit=max_prompt_chars=4000", keys=KEYS)
    yield process
    process.stop(signal.SIGKILL)


@pytest.fixture
def start_server(model):
    """Start further servers of the model; those that a test leaves are killed."""
    started = []

    def start(*options, **settings):
        started.append(ServerProcess(model, *options, **settings))
        return started[-1]

    yield start
    for process in started:
        process.stop(signal.SIGKILL)


@pytest.fixture(scope="session")
def llm(model):
    """Load the model of the server here; its results are the reference."""
    from kvad.llm import LLM

    with LLM.load(model, block_size=16, max_num_seqs=8) as loaded:
        yield loaded

"""Options of all commands that run a model: device, dtype, memory, steps and the log."""

import logging
import subprocess
import sys

import click
import pytest

import kvad.llm as kvad_llm
from kvad.cli.parameters import DeviceOptions, parse_memory
from kvad.errors import UsageError
from tests.cli.test_help import PAGES
from tests.support.cli_checkpoints import write_model

NAMES = {"device", "dtype", "memory", "max_num_batched_tokens", "max_inter_token", "verbose"}
# Commands with a MODEL that do not run it, or have the options in other files.
NO_ENGINE = {"import", "export", "merge", "quantize", "tokenize", "chat-template", "session show", "plan", "doctor"}
RUN_MODEL = [
    name
    for name, page in PAGES.items()
    if any(isinstance(param, click.Argument) and param.name == "model" for param in page.params)
    and name not in NO_ENGINE
]


@pytest.fixture
def log_level():
    """Restore the level of the log."""
    yield
    logging.getLogger("kvad").setLevel(logging.NOTSET)


@pytest.mark.parametrize("name", RUN_MODEL)
def test_commands_that_run_a_model_have_the_options(name):
    assert {param.name for param in PAGES[name].params} >= NAMES
    assert {"generate", "chat", "embed", "translate", "eval", "bench cache", "inspect"} <= set(RUN_MODEL)
    assert set(DeviceOptions.__annotations__) == NAMES


@pytest.mark.parametrize(
    ("text", "amount"),
    [("auto", "auto"), ("0.5", 0.5), ("25%", 0.25), ("1.0", 1.0), ("8GiB", 8 << 30), ("1.5G", 3 << 29), ("4096", 4096)],
)
def test_memory_is_parsed(text, amount):
    assert parse_memory(text) == amount and type(parse_memory(text)) is type(amount)


@pytest.mark.parametrize("text", ["0", "0.0", "much", "150%", "-1", "1.5", "0%"])
def test_invalid_memory(kvad, model, text):
    with pytest.raises(UsageError, match="write it like auto, 8GiB or"):
        parse_memory(text)
    result = kvad("generate", model, "a", f"--memory={text}")
    assert result.code == 2 and result.err.startswith("kvad: error: --memory: ")


@pytest.mark.parametrize("command", ["generate {} a", "chat {}", "inspect {} --attention a", "bench cache {}"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--device cuda:7", "device 'cuda:7': this torch finds no CUDA device"),
        ("--device tpu9", "unknown device 'tpu9'"),
    ],
)
def test_unknown_devices(kvad, model, monkeypatch, command, options, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = kvad(f"{command.format(model)} {options}", stdin=b"")
    assert result.code == 2 and f"kvad: error: {message}" in result.err and not result.out


def test_device_and_dtype_are_used(kvad, model, monkeypatch):
    loads, load = [], kvad_llm.LLM.load
    monkeypatch.setattr(kvad_llm.LLM, "load", lambda path, **fields: loads.append(load(path, **fields)) or loads[-1])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for command in ("generate {} a -n 1", "inspect {} --cache --prompt a -n 1", "inspect {} --attention a"):
        assert kvad(f"{command.format(model)} --device auto --dtype float64 --memory 64MiB").code == 0
    assert [(llm.engine.device.type, llm.memory_plan.weights_dtype) for llm in loads] == [("cpu", "float64")] * 3
    assert kvad(f"generate {model} a -n 1 --max-num-batched-tokens 7 --prefill-chunk-size 3").code == 0
    assert loads[-1].engine.config.max_num_batched_tokens == 7
    assert loads[-1].engine.cache.prefill_chunk_size == 3
    for text, seconds in (("100ms", 0.1), ("0.5s", 0.5), ("2", 2.0)):
        assert kvad(f"generate {model} a -n 1 --max-inter-token {text}").code == 0
        assert loads[-1].engine.config.max_inter_token == pytest.approx(seconds)
    result = kvad(f"generate {model} a -n 1 --max-inter-token 0ms")
    assert result.code == 2 and "--max-inter-token: '0ms' is not a time above 0" in result.err


def test_memory_below_one_block(kvad, model):
    for command in (f"generate {model} a", f"chat {model}"):
        result = kvad(f"{command} --memory 1KiB", stdin=b"")
        assert result.code == 2 and result.err.count("kvad: error: memory: 1 sequence of ") == 1
        assert "1.00 KiB is allowed (--memory)" in result.err and not result.out
    result = kvad(f"verify {model} --memory 1KiB")
    assert result.code == 2 and "kvad: error: memory: --num-prompts 5: verifying takes " in result.err


def test_model_with_a_long_limit(kvad, tmp_path, monkeypatch):
    """Its whole limit would need 30 GiB: `generate` needs less, `chat` gets less and reports it."""
    model = write_model(tmp_path / "long", limit=80_000_000)
    monkeypatch.setattr("kvad.engine.loading.available_bytes", lambda: 64 << 20)
    result = kvad("generate", model, "def", "-n", "4", "--seed", "1")
    assert result.code == 0 and "memory:" not in result.err
    result = kvad("chat", model, "-n", "4", "--seed", "1", "-v", stdin=b"a\n")
    assert result.code == 0
    assert "kvad: memory: sequences end at " in result.err and "the model's limit is 80,000,000" in result.err
    assert ": room for 1 sequence of " in result.err


@pytest.mark.parametrize(
    ("flag", "has_info", "has_debug"), [("", False, False), ("-v", True, False), ("-vv", True, True)]
)
def test_levels_of_the_log(kvad, model, log_level, flag, has_info, has_debug):
    result = kvad(f"generate {model} abcdefghij --seed 1 -n 24 --n 3 --num-blocks 5 --max-num-seqs 3 {flag}")
    assert result.code == 0
    assert ("the pool is full: a sequence is preempted" in result.err) == has_info
    for text in ("request 0, sample 0 is admitted: 0 of 10 tokens are cached", "is resumed: ", " ended: length"):
        assert (text in result.err) == has_debug


def test_evicted_blocks_are_logged(kvad, model, log_level):
    prompts = ["a" * 40, "b" * 40, "c" * 40]
    result = kvad(f"generate {model} -n 1 --seed 1 --num-blocks 3 --max-num-seqs 1 -vv", *prompts)
    assert result.code == 0 and "is evicted from the prefix cache" in result.err


def test_log_of_the_python_api(model):
    code = f"import kvad\nwith kvad.LLM.load({str(model)!r}) as llm: llm.generate('a', max_tokens=1, seed=1)"
    environment = {"KVAD_LOG": "debug", "PATH": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "is admitted" in result.stderr and "room for " in result.stderr, result.stderr
    assert all(line.startswith("kvad: ") for line in result.stderr.splitlines())


def test_level_of_the_variable(kvad, model, monkeypatch, log_level):
    command = f"generate {model} a -n 1 --seed 1"
    for level, shown in (("INFO", ": room for 1 sequence of 2 tokens"), ("debug", "is admitted"), ("loud", "")):
        monkeypatch.setenv("KVAD_LOG", level)
        assert shown in kvad(command).err
    logging.getLogger("kvad").handlers.clear()
    assert "kvad: KVAD_LOG: must be debug, info or warning, got 'loud'" in kvad(command).err

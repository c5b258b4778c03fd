"""A tiny chat model with a byte-level tokenizer, and ``kvad serve`` as a process of the tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvad.checkpoint import GenerationConfig
from kvad.checkpoint.native import save_checkpoint
from kvad.config.layers import AttentionConfig, GatedMLPConfig, LayerConfig, StackConfig
from kvad.config.model import ModelConfig
from kvad.text.hf_tokenizer import HFTokenizer, byte_alphabet
from tests.support.random_models import build, pair_config

LIMIT = 4096
BLOCK_SIZE = 16
CALL = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
MARKS = ("<tool_call>", "</tool_call>", CALL)  # tokens, so that a test can force a call; the first one is special
CHAT_TEMPLATE = """{%- if messages[0].content == 'bomb' %}{% for i in range(99999) %}{% for j in range(99999) %}
{%- endfor %}{% endfor %}{% endif -%}
{%- if tools %}Tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}{# <tool_call> #}
{% endif %}{% for turn in messages %}[{{ turn.role }}] {{ turn.content or '' }}
{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"""
START_SECONDS = 60.0

# A model that thinks: without tools it writes <think>, with tools the messages of gpt-oss. All marks are one token.
THINKING_SPECIALS = ("<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")
THINKING_TEXTS = (
    "analysis", "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
    '{"city": "Rome"}',
)  # fmt: skip
THINK, END_THINK, CHANNEL, MESSAGE, END_MESSAGE, END_CALL, ANALYSIS, HEADER, ARGUMENTS = range(257, 266)
THINKING_CALL = (CHANNEL, ANALYSIS, MESSAGE, *b"XY", END_MESSAGE, HEADER, ARGUMENTS, END_CALL)
THINKING_TEMPLATES = {
    "chat_template.jinja": """{% for turn in messages %}[{{ turn.role }}] {{ turn.content or '' }}
{%- if turn.reasoning_content %}({{ turn.reasoning_content }}){% endif %}
{% endfor %}{% if add_generation_prompt %}[assistant] {% if enable_thinking or reasoning_effort == 'high' %}<think>
{% elif enable_thinking is false %}<think></think>{% endif %}{% endif %}""",
    "additional_chat_templates/tool_use.jinja": """{{ reasoning_effort }}{# <|channel|><|message|> #}
{% for turn in messages %}[{{ turn.role }}] {{ turn.content or turn.thinking }}
{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}""",
}


def make_tokenizer(specials: Sequence[str] = MARKS[:1], texts: Sequence[str] = MARKS[1:]) -> HFTokenizer:
    """Return a tokenizer with a token per byte (its id is the byte), an end token, special tokens and further texts."""
    characters = {byte: character for character, byte in byte_alphabet().items()}
    backend = Tokenizer(models.BPE({characters[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", *specials])
    backend.add_tokens(list(texts))
    return HFTokenizer(backend, {"eos": "</s>"})


def write_model(
    folder: Path, *, seed: int = 0, tokenizer: HFTokenizer | None = None, templates: Mapping[str, str] | None = None
) -> Path:
    """Write a random decoder of two layers whose greedy text depends on the whole context."""
    tokenizer = tokenizer or make_tokenizer()
    layer = LayerConfig(AttentionConfig(4, 2), GatedMLPConfig(96))
    config = ModelConfig(
        hidden_size=64, vocab_size=tokenizer.vocab_size, max_seq_len=LIMIT, decoder=StackConfig(2, {"L": layer})
    )
    torch.manual_seed(seed)
    sources = templates or {"chat_template.jinja": CHAT_TEMPLATE}
    files = {name: source.encode() for name, source in sources.items()}
    save_checkpoint(folder, config, build(config).float().state_dict(), tokenizer, files=files)
    return folder


def write_translator(folder: Path, *, seed: int = 0) -> Path:
    """Write a random encoder-decoder of the same tokenizer; its best translations end at its limit of 24 tokens."""
    tokenizer = make_tokenizer()
    config = replace(pair_config(), vocab_size=tokenizer.vocab_size, max_seq_len=24)
    generation = GenerationConfig(decoder_start_token_id=tokenizer.special_tokens.eos)
    save_checkpoint(folder, config, build(config, seed=seed).float().state_dict(), tokenizer, generation=generation)
    return folder


class ServerProcess:
    """``kvad serve`` on a free port.

    Args:
        model: The checkpoint.
        *options: Further options.
        keys: API keys.
    """

    def __init__(self, model: Path, *options: object, keys: tuple[str, ...] = ()) -> None:
        environment = {**os.environ, "KVAD_API_KEY": ",".join(keys), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        arguments = ["serve", model, "--port", 0, "--block-size", BLOCK_SIZE, "--model-name", "tiny", *options]
        command = [sys.executable, "-m", "kvad", *map(str, arguments)]
        self.log: list[str] = []
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        threading.Thread(target=self._read_log, daemon=True).start()
        line = self.process.stdout.readline()
        assert line.startswith("serving "), (line, "".join(self.log))
        self.url = line.split()[1]
        self.port = int(self.url.rpartition(":")[2])
        headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=30)

    def _read_log(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)

    def post(self, path: str, **fields: object) -> httpx.Response:
        return self.http.post(path, json=fields)

    def complete(self, prompt: object, **fields: object) -> dict:
        """Return the response of a greedy completion that ignores the end token."""
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def cache(self) -> dict:
        return self.http.get("/cache").json()

    def blocks_in_use(self) -> int:
        """Return the number of blocks that sequences use; those of the prefix cache alone are not counted."""
        return sum(pool.count("u") + pool.count("s") for pool in self.cache()["pools"])

    def wait_for(self, condition: Callable[[dict], bool], seconds: float = 10.0) -> dict:
        """Return the first state of the cache that satisfies a condition."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition(state := self.cache()):
                return state
            time.sleep(0.005)
        raise AssertionError(f"still not so after {seconds} s: {self.cache()}")

    @property
    def engine_process(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()  # others render templates
        (engine,) = (child for child in children if "kvad.server.engine_process" in child.cmdline())
        return engine

    def stop(self, number: int = signal.SIGTERM, seconds: float = 15.0) -> int:
        """Send a signal and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.http.close()
        return self.process.wait(seconds)


def open_stream(server: ServerProcess, prompt: object, *, key: str = "", **fields: object) -> socket.socket:
    """Send a streaming completion that ignores the end token, and return its socket."""
    body = json.dumps({"prompt": prompt, "stream": True, "ignore_eos": True, "temperature": 0, **fields})
    connection = socket.create_connection(("127.0.0.1", server.port))
    authorization = key or server.http.headers.get("authorization", "none").removeprefix("Bearer ")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {authorization}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    return connection


def reset(connection: socket.socket) -> None:
    """Close a connection with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def parse_events(text: str) -> list[dict | str]:
    """Return the data of server-sent events; "[DONE]" is kept as text."""
    events = []
    for part in text.split("\n\n"):
        data = "\n".join(line[6:] for line in part.split("\n") if line.startswith("data: "))
        if data:
            events.append(data if data == "[DONE]" else json.loads(data))
    return events


def forced(*tokens: int) -> dict:
    """Return fields that generate these tokens, all different, in this order: a bias falls from one to the next."""
    assert len(set(tokens)) == len(tokens)
    bias = {str(token): 1000 - 20 * place for place, token in enumerate(tokens)}
    return {"logit_bias": bias, "no_repeat_ngram_size": 1, "temperature": 0, "max_tokens": len(tokens)}


def read_in_background(connections: list[socket.socket]) -> tuple[list[threading.Thread], list[str]]:
    """Read sockets to their ends in threads; return (threads, texts)."""
    texts = [""] * len(connections)

    def read(index: int) -> None:
        data = b""
        while part := connections[index].recv(65536):
            data += part
        texts[index] = data.decode()

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(connections))]
    for thread in threads:
        thread.start()
    return threads, texts


def events_of(text: str) -> list[dict | str]:
    """Return the events of a whole response with a chunked body."""
    rest, body = text.partition("\r\n\r\n")[2], ""
    while rest != "0\r\n\r\n":
        size, _, rest = rest.partition("\r\n")
        length = int(size, 16)
        body, rest = body + rest[:length], rest[length + 2 :]
    return parse_events(body)


def wait_for_tokens(server: ServerProcess, num_sequences: int) -> None:
    """Wait until this many sequences run and all have generated tokens, so that their responses have begun."""

    def is_decoding(state: dict) -> bool:
        sequences = state["sequences"]
        return len(sequences) >= num_sequences and all(s["tokens"] > s["prompt_tokens"] + 4 for s in sequences)

    server.wait_for(is_decoding)


def check_drain(server: ServerProcess) -> None:
    """Send SIGTERM while requests run: new ones are refused, short ones end, long ones at the timeout.

    The last of them is not a stream.
    """
    short = [open_stream(server, f"{i} short", max_tokens=200) for i in range(2)]
    long = [open_stream(server, f"{i} long", max_tokens=4000) for i in range(3)]
    long.append(open_stream(server, "not a stream", max_tokens=4000, stream=False))
    wait_for_tokens(server, len(long))
    watcher = httpx.Client(base_url=server.url, headers=server.http.headers)
    assert watcher.get("/ready").status_code == 200
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    threads, texts = read_in_background([*short, *long])
    time.sleep(0.15)
    ready, refused = watcher.get("/ready"), watcher.post("/v1/completions", json={"prompt": "x"})
    assert ready.status_code == 503 and refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down" and refused.headers["retry-after"]
    assert watcher.get("/health").status_code == 200
    for thread in threads:
        thread.join(10)
    assert 0.4 < time.monotonic() - begun < 6
    for text in texts[:2]:
        *_, last, done = events_of(text)
        assert last["choices"][0]["finish_reason"] == "length" and done == "[DONE]"
    for text in texts[2:5]:
        *_, error, done = events_of(text)
        assert error["error"]["code"] == "shutting_down" and done == "[DONE]"
    head, _, body = texts[5].partition("\r\n\r\n")
    assert "503 Service Unavailable" in head and "retry-after: 5" in head
    assert json.loads(body)["error"]["code"] == "shutting_down"
    watcher.close()
    assert server.stop() == 0, server.log

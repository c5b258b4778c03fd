"""Names on the hub and paths; downloads from a fake hub and from a local server; errors in one line."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors

from kvad.checkpoint import hub, open_checkpoint
from kvad.checkpoint.folder import check_readable_weights
from kvad.checkpoint.hub import resolve_model_path
from kvad.checkpoint.safetensors_io import open_tensors, write_sharded
from kvad.errors import CheckpointError, NetworkError, SaveError, UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_network(tmp_path, monkeypatch):
    """Use an empty working folder and cache, and fail on any network call."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def refuse(*arguments, **options):
        raise AssertionError("a network call")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub, "HfApi", refuse)


def refusal(*arguments, kind=CheckpointError, **options):
    with pytest.raises(kind) as caught:
        resolve_model_path(*arguments, **options)
    assert type(caught.value) is kind and "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- names and paths


def test_an_existing_folder_is_returned(tmp_path, monkeypatch):
    Path("org/name").mkdir(parents=True)
    assert (
        resolve_model_path("org/name") == Path("org/name")
        and resolve_model_path(tmp_path) == tmp_path
        and resolve_model_path(".") == Path()
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model_path("~/here") == tmp_path / "here"
    message = refusal("org/name", revision="main", kind=UsageError)
    assert "org/name is a folder and has no revision 'main'" in message


@pytest.mark.parametrize("path", ["./m", "../m", "/no/m", "~/no", "~nobody-of-that-name/m", "a/b/c", "runs/x", "./a@b"])
def test_a_path_causes_no_network_call(path):
    Path("runs").mkdir()
    assert f"no such folder: {path}" in refusal(path)


def test_a_misspelled_path_gets_a_suggestion():
    Path("runs/shakespeare").mkdir(parents=True)
    message = refusal("runs/shakespear")
    assert "did you mean runs/shakespeare?" in message and "hf://runs/shakespear is the name on the hub" in message
    assert "did you mean runs?" in refusal("./run/x") and "hf://" not in refusal("./run/x")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "gpt2",
            "hf://gpt2",
            "a/b/",
            "a b/c",
            "org/",
            "/@x",
            "org/name@",
            "org/-x",
            "org/x.",
            "o--g/x",
            "a/b@c d",
        ),
        *("é/x", "hf://../x", "hf://a/b/c", "x\0/y", "x" * 5000, "o/" + "x" * 100, "org\\name", "https://hf.co/a/b"),
    ],
)
def test_neither_a_path_nor_a_name(name):
    assert any(words in refusal(name) for words in ("neither a folder nor a name", "no such folder"))


def test_a_file_is_no_folder_unless_it_is_a_gguf_file():
    Path("m.gguf").touch()
    Path("m.safetensors").touch()
    assert resolve_model_path("m.gguf") == Path("m.gguf")
    with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
        _ = open_checkpoint("m.gguf").config
    assert "Give the folder" in refusal("m.safetensors")


def test_the_module_loads_neither_torch_nor_the_hub():
    code = "import sys, kvad.checkpoint.hub; print({'torch', 'huggingface_hub', 'requests'} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert process.stdout.strip() == "set()", process.stderr


# ---------------------------------------------------------------- requests to huggingface_hub


class FakeHub:
    """Replaces snapshot_download: a repository of names and contents that records its calls."""

    def __init__(self, monkeypatch, tmp_path, files):
        self.folder, self.files, self.calls = tmp_path / "snapshots" / ("c" * 40), files, []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda token: self)

    def download(self, repo, *, allow_patterns, ignore_patterns, **options):
        self.calls.append((repo, options))
        chosen = huggingface_hub.utils.filter_repo_objects(
            self.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in chosen:
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_text(self.files[name])
        return str(self.folder)

    def list_repo_files(self, repo, revision):
        assert revision == "c" * 40
        return list(self.files)


NEEDED = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
    *("spiece.model", "source.spm", "model.safetensors.index.json"),
    *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
]
OTHERS = [
    *("README.md", "pytorch_model.bin", "modeling_x.py", "tokenization_x.py", "tokenizer_x.py", "original/model.pth"),
    *("onnx/model.safetensors", "consolidated.safetensors", "model.fp16.safetensors", "x-q4.gguf", "training_args.bin"),
    *("1_Pooling/x.py", "2_Dense/pytorch_model.bin", "2_Dense/x/config.json", "4bit/model.safetensors"),
    *("original/config.json", "onnx_1/config.json", "1_x/tokenizer.json"),
    *("original/tokenizer.model", "flax_model.msgpack", "events.tfevents", "adapter_model.safetensors"),
]


def test_only_needed_files_are_requested(monkeypatch, tmp_path):
    fake = FakeHub(monkeypatch, tmp_path, dict.fromkeys([*NEEDED, *OTHERS], "{}"))
    assert resolve_model_path("org/name") == fake.folder
    files = (path for path in fake.folder.rglob("*") if path.is_file())
    assert sorted(str(path.relative_to(fake.folder)) for path in files) == sorted(NEEDED)


def test_revision_and_token_are_passed_on(monkeypatch, tmp_path):
    fake = FakeHub(monkeypatch, tmp_path, {"config.json": "{}", "model.safetensors": ""})
    resolve_model_path("hf://org/name@refs/pr/3", token="hf_x")
    (repo, first), (_, second) = fake.calls
    assert repo == "org/name" and first == {"revision": "refs/pr/3", "local_files_only": False, "token": "hf_x"}
    assert second == {**first, "revision": "c" * 40}  # the weights are of the commit that the config was of
    resolve_model_path("org/name", revision="v1")
    assert fake.calls[2][1]["revision"] == "v1"
    assert "two revisions of org/name: 'v1' and 'v2'" in refusal("org/name@v1", revision="v2", kind=UsageError)


@pytest.mark.parametrize(
    ("variable", "offline", "local"), [("1", None, True), ("", None, False), ("", True, True), ("1", False, False)]
)
def test_offline(monkeypatch, tmp_path, variable, offline, local):
    monkeypatch.setenv("HF_HUB_OFFLINE", variable)
    fake = FakeHub(monkeypatch, tmp_path, {"config.json": "{}"})
    fake.folder.mkdir(parents=True)
    (fake.folder / "model.safetensors").touch()
    resolve_model_path("org/name", offline=offline)
    assert fake.calls[0][1]["local_files_only"] is local and len(fake.calls) == (1 if local else 2)


def test_a_local_folder_hides_a_hub_name_without_prefix(monkeypatch, tmp_path):
    Path("org").mkdir()
    assert "no such folder: org/name (hf://org/name is the name on the hub.)" in refusal("org/name")
    fake = FakeHub(monkeypatch, tmp_path, {"model.safetensors": ""})
    assert resolve_model_path("hf://org/name") == fake.folder == resolve_model_path(Path("hf://org/name"))


def test_an_unreadable_model_is_refused_before_its_weights_are_downloaded(monkeypatch, tmp_path):
    config = json.dumps({"quantization_config": {"quant_method": "hqq"}})
    fake = FakeHub(monkeypatch, tmp_path, {"config.json": config, "model.safetensors": ""})
    assert "org/name@v1 is quantized (HQQ)" in refusal("org/name@v1") and len(fake.calls) == 1


def test_a_repository_without_safetensors(monkeypatch, tmp_path):
    FakeHub(monkeypatch, tmp_path, {"config.json": "{}", "pytorch_model.bin": "", "onnx/model.safetensors": ""})
    message = refusal("org/name")
    assert "org/name has no safetensors, only pytorch_model.bin" in message and "refs/pr/N" in message
    FakeHub(monkeypatch, tmp_path / "2", {"m-q4.gguf": "", "README.md": ""})
    assert "only m-q4.gguf" in refusal("org/name")
    FakeHub(monkeypatch, tmp_path / "3", {"config.json": "{}"})
    assert "in the cache without its weights" in refusal("org/name", offline=True)


# ---------------------------------------------------------------- errors


def http(kind, status):
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind("many\nlines\nRequest ID: x", response=response)


def caused(error, cause):
    error.__cause__ = cause
    return error


LOCAL, STATUS = errors.LocalEntryNotFoundError, errors.HfHubHTTPError
ERRORS = {
    "no such": (http(errors.RepositoryNotFoundError, 401), "no such model on the hub: org/name (Check the name"),
    "gated": (http(errors.GatedRepoError, 403), "is gated: its owner must grant access (Request it at https://hugging"),
    "gated, login": (http(errors.GatedRepoError, 401), "hf auth login or set HF_TOKEN"),
    "revision": (http(errors.RevisionNotFoundError, 404), "org/name has no revision 'main'"),
    "a bad token": (http(STATUS, 401), "responded 401 for org/name (Run hf auth login"),
    "too many": (http(STATUS, 429), "responded 429 for org/name (Try again later. The cache is empty"),
    "down": (caused(LOCAL("x"), http(STATUS, 503)), "the hub responded 503 for org/name"),
    "no network": (caused(LOCAL("x"), ConnectionError()), "cannot reach the hub for org/name (Check the connection"),
    "reset": (ConnectionResetError(errno.ECONNRESET, "reset"), "failed for org/name: ConnectionReset"),
    "short file": (OSError("Consistency check failed:\nx"), "failed for org/name: OSError (Check it and"),
    "too slow": (TimeoutError(), "the connection to the hub failed for org/name: TimeoutError"),
}


UNREACHABLE = ("too many", "down", "no network", "reset", "short file", "too slow")  # no input can mend these


def fail(monkeypatch, error):
    def download(*arguments, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_one_clear_line(monkeypatch, name):
    error, expected = ERRORS[name]
    fail(monkeypatch, error)
    kind = NetworkError if name in UNREACHABLE else CheckpointError
    message = refusal("org/name", kind=kind)
    assert "org/name" in message and expected in message and "Request ID" not in message
    assert kind.exit_code == (1 if name in UNREACHABLE else 2)


def test_errors_of_network_libraries_are_translated(monkeypatch):
    for module in ("requests.exceptions", "httpx"):
        kind = type("ProxyError", (Exception,), {"__module__": module})
        fail(monkeypatch, kind("x"))
        assert "the connection to the hub failed for org/name: ProxyError" in refusal("org/name", kind=NetworkError)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        caused(LOCAL("x"), OSError(errno.ENOSPC, "full")),
        RuntimeError("Data processing error: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_named(monkeypatch, tmp_path, error):
    fail(monkeypatch, error)
    message = refusal("org/name@v1", kind=SaveError)
    assert f"no space left while downloading org/name@v1 to {tmp_path / 'cache'}" in message and "HF_HOME" in message


def test_a_read_only_cache_is_named(monkeypatch, tmp_path):
    fail(monkeypatch, PermissionError(errno.EACCES, "Permission denied"))
    assert refusal("org/name", kind=SaveError) == f"cannot write to {tmp_path / 'cache'}: Permission denied"


def test_unexpected_errors_are_not_translated(monkeypatch):
    fail(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        resolve_model_path("org/name")


def test_cached_models_are_listed(monkeypatch, tmp_path):
    for name in ("Qwen/Qwen3-0.6B", "org/other", *(f"z/{i}" for i in range(5))):
        folder = tmp_path / "cache" / f"models--{name.replace('/', '--')}" / "snapshots" / "0123"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
    fail(monkeypatch, LOCAL("x"))
    message = refusal("org/name@v1", offline=True)
    assert "org/name@v1 is not in the cache, and kvad is offline" in message
    assert "Cached models: Qwen/Qwen3-0.6B, org/other, z/0, z/1, z/2 and 2 more" in message
    fail(monkeypatch, http(errors.RepositoryNotFoundError, 404))
    assert "did you mean 'Qwen/Qwen3-0.6B'?" in refusal("Qwen/Qwen3-0.6")


# ---------------------------------------------------------------- a local server, with the real library

COMMIT = "a" * 40

PROGRAM = """
import sys
from pathlib import Path
from kvad.checkpoint.hub import resolve_model_path
from kvad.errors import KvadError
for line in sys.stdin:
    name, offline = line.split()
    try:
        print("path", resolve_model_path(name, offline=offline == "offline"), flush=True)
    except KvadError as error:
        print(type(error).__name__, error, flush=True)
"""


class Hub(BaseHTTPRequestHandler):
    """The three responses of huggingface.co to a download; the first response of files in ``cut`` is half."""

    files: dict[str, bytes]
    cut: set[str]
    log: list[tuple[str, str]]

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.describe("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main")
        elif parts[:2] == ["org", "gated"]:
            self.respond(403, b"", {"X-Error-Code": "GatedRepo"})
        else:
            self.send_file(parts[-1])

    def describe(self, repo, revision):
        if repo not in ("org/name", "org/gated"):
            self.respond(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT):
            self.respond(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            siblings = [{"rfilename": name} for name in self.files]
            self.respond(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode(), {})

    def send_file(self, name):
        content = self.files[name]
        first = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
        self.log.append((self.command, name if not first else f"{name} from {first}"))
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        if self.command == "GET" and name in self.cut:
            self.cut.discard(name)
            self.respond(200, content[first:], headers, half=True)
        else:
            self.respond(206 if first else 200, content[first:], headers)

    def respond(self, status, body, headers, half=False):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if half else body)
        if half:
            self.close_connection = True
            self.connection.shutdown(2)


@pytest.fixture
def server(tmp_path):
    write_sharded(tmp_path / "model", {"w": torch.arange(8_000_000.0)})
    Hub.files = {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b"{}",
        "modeling_x.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickle",
        "model.safetensors": (tmp_path / "model" / "model.safetensors").read_bytes(),
    }
    Hub.cut, Hub.log = set(), []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def resolve(server, tmp_path, *lines):
    """Resolve each ``NAME online`` or ``NAME offline`` in a process with the real library."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))},
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "no_proxy": "127.0.0.1",
    }
    command, text = [sys.executable, "-c", PROGRAM], "\n".join(lines)
    options = {"capture_output": True, "text": True, "cwd": ROOT, "env": environment}
    process = subprocess.run(command, input=text, timeout=100, **options)
    assert process.returncode == 0, process.stderr
    return [tuple(line.split(" ", 1)) for line in process.stdout.splitlines()]


def test_a_download_is_resumed_and_then_used_offline(server, tmp_path):
    Hub.cut = {"model.safetensors"}
    lines = "org/name online", "org/name online", "org/name offline", "org/other offline"
    first, again, offline, other = resolve(server, tmp_path, *lines)
    assert first[0] == "NetworkError" and "the connection to the hub failed for org/name: " in first[1]
    assert "run the command again. The download will be resumed. The cache is empty" in first[1]
    assert again == offline and again[0] == "path"
    folder = Path(again[1])
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert torch.equal(open_tensors(folder)["w"], torch.arange(8_000_000.0))
    downloads = [name for command, name in Hub.log if command == "GET"]
    resumed = [name for name in downloads if " from " in name]
    assert len(downloads) == 4 and len(resumed) == 1 and int(resumed[0].split()[-1]) > 1_000_000
    assert other == ("CheckpointError", other[1]) and "Cached models: org/name" in other[1] and "offline" in other[1]


def test_hub_refusals(server, tmp_path):
    none, gated, revision = resolve(server, tmp_path, "org/none online", "org/gated online", "org/name@v9 online")
    assert none[0] == gated[0] == revision[0] == "CheckpointError"
    assert none[1].startswith("no such model on the hub: org/none (Check the name")
    assert gated[1].startswith("org/gated is gated: its owner must grant access")
    assert revision[1].startswith("org/name has no revision 'v9'")


def test_no_server_responds(server, tmp_path):
    server.shutdown()
    server.server_close()
    message = "cannot reach the hub for org/name (Check the connection. The cache is empty.)"
    assert resolve(server, tmp_path, "org/name online") == [("NetworkError", message)]


# ---------------------------------------------------------------- kinds of weights


def folder_of(tmp_path, config=None, *names):
    folder = tmp_path / "m"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name in names:
        (folder / name).touch()
    return folder


KINDS = {
    "pickle": ({}, ["model.pt"], "no safetensors, only model.pt (Of pickles, kvad reads pytorch_model.bin"),
    "pickles": ({}, ["a.ckpt", "b.ckpt"], "safe_serialization=True"),
    "pth": (None, ["consolidated.00.pth", "params.json"], "only consolidated.00.pth"),
    "gguf": (None, ["m-q4_k_m.gguf", "README.md"], "only m-q4_k_m.gguf (GGUF is llama.cpp's format"),
    "hqq": ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, ["model.safetensors"], "quantized (HQQ)"),
    "eetq": (
        {"quantization_config": {"quant_method": "eetq"}},
        ["model.safetensors"],
        "Use the model that it was made",
    ),
    "quantized": ({"quantization_config": {"bits": 4}}, ["model.safetensors"], "quantized (quantization_config)"),
    "oddly": ({"quantization_config": {"quant_method": "a\nb"}}, ["model.safetensors"], "(quantization_config)"),
    "compressed": ({"compression_config": {"x": 1}}, ["model.safetensors"], "quantized (compression_config)"),
    "adapter": (None, ["adapter_config.json", "adapter_model.safetensors"], "is an adapter (LoRA), not a model"),
    "onnx": ({}, ["model.onnx"], "only model.onnx"),
    "no index": ({}, ["model-00001-of-00002.safetensors"], "only model-00001-of-00002.safetensors"),
    "nothing": ({}, ["README.md"], "has no weights: neither model.safetensors nor model.safetensors.index.json"),
    "a config that is none": ("[" * 99_999, ["model.safetensors"], "config.json is not JSON"),
}


@pytest.mark.parametrize("name", KINDS)
def test_other_kinds_of_weights_are_refused_with_a_hint(tmp_path, name):
    config, names, expected = KINDS[name]
    folder = folder_of(tmp_path, config, *names)
    for function in (check_readable_weights, open_tensors):
        with pytest.raises(CheckpointError) as caught:
            function(folder)
        assert expected in str(caught.value) and str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["gguf", "pth", "adapter"])
def test_other_weights_without_a_config_are_refused_by_name(tmp_path, name):
    """A run may have any further files."""
    _, names, expected = KINDS[name]
    folder = folder_of(tmp_path, None, *names)
    assert expected in refusal(folder) and resolve_model_path(folder, weights=False) == folder
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    assert resolve_model_path(folder) == folder


def test_other_files_next_to_complete_weights_are_ignored(tmp_path):
    others = ["pytorch_model.bin", "m.gguf", "adapter_config.json", "consolidated.safetensors"]
    check_readable_weights(folder_of(tmp_path, {"quantization_config": None}, "model.safetensors", *others))


def test_a_missing_folder_and_a_file_are_refused(tmp_path):
    (tmp_path / "m.gguf").touch()
    with pytest.raises(CheckpointError, match="no such folder"):
        open_tensors(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"is a file \(GGUF"):
        open_tensors(tmp_path / "m.gguf")


def test_patterns_match_no_code_and_no_pickle():
    assert not [pattern for pattern in hub.SMALL + hub.LARGE if pattern.endswith((".py", ".bin", ".pt", ".pkl", "*.*"))]

"""``kvad bench serve`` against a real server."""

import json

from kvad.cli.main import main
from tests.server.conftest import KEYS


def test_bench_of_a_running_server(server, capsys):
    """All requests complete, outputs under load are the outputs alone, and counts are those of the server."""
    lengths = ("--num-prompts", 12, "--input-len", 60, "--output-len", 20, "--dataset", "prefix", "--prefix-len", 50)
    checks = (
        "--max-concurrency",
        6,
        "--check-outputs",
        12,
        "--goodput",
        "ttft:60000",
        "--server-pid",
        server.process.pid,
    )
    command = ["bench", "serve", server.url, "--api-key", KEYS[0], *lengths, *checks]
    assert main([*map(str, command), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["completed"] == record["num_prompts"] == 12 and record["errors"] == {}
    assert record["outputs_equal"] == record["outputs_checked"] == 12
    assert record["total_cached_tokens"] > 0 and record["request_goodput"] == record["request_throughput"]
    assert record["server_rss_max"] > 1e8 and record["total_output_tokens"] > 100 and record["mean_ttft_ms"] > 0
    assert main([*map(str, command), "--chat", "--num-prompts", "3"]) == 0
    text = capsys.readouterr().out
    assert "3 requests in" in text and "3 of 3 texts are the same alone" in text and "time to first token" in text


def test_bad_arguments(server, capsys):
    for arguments, problem in (
        ((server.url,), "--api-key"),
        ((server.url, "--api-key", KEYS[0], "--goodput", "ttft"), "ttft:500"),
        ((server.url, "--api-key", KEYS[0], "--model-name", "other"), "404"),
    ):
        assert main(["bench", "serve", *arguments]) == 2
        assert problem in capsys.readouterr().err


def test_bench_of_a_model_starts_a_server_without_keys(model, capsys, monkeypatch):
    monkeypatch.setenv("KVAD_API_KEY", "one,two")  # of other servers
    command = ["bench", "serve", str(model), "--model-name", "mine", "-n", "2", "--output-len", "4", "--json"]
    assert main(command) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["completed"] == 2 and record["model_id"] == "mine"

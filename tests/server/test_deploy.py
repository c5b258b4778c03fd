"""The files of deploy/ name metrics, options and packages that exist."""

import json
import re
import tomllib
from pathlib import Path

from kvad.cli.commands.serve import serve_command
from kvad.server.metrics import ServerMetrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
STATS = {
    "scheduler": dict.fromkeys(("running", "waiting", "draft_tokens", "accepted_tokens"), 0),
    "cache": {"used": [0], "total": [1], "evictions": [0]},
    "times": {"steps": 0, "total": 0.0, "model": 0.0},
}


def test_the_dashboard_names_metrics_of_the_server():
    metrics = ServerMetrics("tiny")
    metrics.observe_finish("stop")
    metrics.observe_failure("engine_error", 1)
    metrics.observe_response(200)
    exposed = set(re.findall(r"^([a-z]+:[a-z_]+)", metrics.expose(STATS, 0).decode(), re.MULTILINE))
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text("utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for expression in expressions for name in re.findall(r"(?:vllm|kvad):[a-z_]+", expression)}
    assert len(names) > 12 and names <= exposed, names - exposed


def test_the_unit_and_the_image_use_options_and_extras_that_exist():
    options = {flag for parameter in serve_command.params for flag in parameter.opts}
    text = (DEPLOY / "kvad.service").read_text("utf-8") + (DEPLOY / "Dockerfile").read_text("utf-8")
    commands = [line for line in text.splitlines() if re.search(r"\bserve\b", line) and "--" in line]
    given = set(re.findall(r"(?<=[\s\"])--[a-z-]+", " ".join(commands)))
    assert len(commands) == 2 and "--host" in given and given <= options
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r'"\.\[([a-z]+)\]"', text)) <= extras.keys()
    assert "torch==2.13.0" in text


def test_the_page_of_metrics_names_those_of_the_server():
    metrics = ServerMetrics("tiny")
    metrics.observe_failure("engine_error", 1)
    metrics.observe_response(200)
    exposed = set(re.findall(r"^# TYPE ([a-z]+:[a-z_0-9]+)", metrics.expose(STATS, 0).decode(), re.MULTILINE))
    page = (ROOT / "docs/reference/metrics.md").read_text("utf-8").partition("## Not offered")[0]
    names = set(re.findall(r"`([a-z]+:[a-z_0-9]+)`", page))
    assert names == {name for name in exposed if not name.endswith("_created")}

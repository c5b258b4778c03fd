"""``kvad verify --round-trip``: sequences that leave the cache and return are compared like those that stay."""

import json
import re

import pytest

from kvad.cache.device.host_copy import HostCopier
from kvad.cache.sessions.state import PendingRestore
from kvad.cli.commands import verify
from kvad.cli.main import main
from kvad.errors import UsageError
from kvad.verify.report import EXACT
from kvad.verify.round_trips import ROUND_TRIPS
from tests.support.verify_models import FLAGS, run_verify, tiny_model

ALL = {"round_trips": tuple(ROUND_TRIPS)}


def test_every_round_trip_is_exact_and_moves_something():
    report = run_verify(tiny_model(), **ALL)
    results = {(result.memory, result.round_trip): result for result in report.round_trips}
    for name in ROUND_TRIPS:
        result = results["paged float64", name]
        assert result.verdict == "exact" and result.moved > 0 and result.max_dlogit <= EXACT, result
    assert results["contiguous float64", "swap"].verdict == "exact"
    reason = results["contiguous float64", "prefix-disk"].reason
    assert reason.startswith("cache.prefix_cache_dir: a contiguous cache shares no blocks")
    assert not report.broken and any(rule.startswith("round trip:") for rule in report.rules)
    report = run_verify(tiny_model())
    assert report.round_trips == () and not any(rule.startswith("round trip:") for rule in report.rules)


def test_policies_with_a_format():
    policies = ("heavy-hitters(8, interval=4)", "offload(8, interval=4)")
    report = run_verify(tiny_model(), **ALL, layouts=("paged",), dtypes=("int8",), policies=policies)
    results = {(each.memory.split()[2].partition("(")[0], each.round_trip): each for each in report.round_trips}
    assert results["heavy-hitters", "session"].verdict == results["heavy-hitters", "swap"].verdict == "exact"
    assert "shares no blocks" in results["heavy-hitters", "prefix-ram"].reason
    assert "keep_state, resume: unavailable with token offload" in results["offload", "session"].reason
    assert results["offload", "swap"].verdict == "recomputed" and results["offload", "offload-disk"].verdict == "exact"


@pytest.mark.parametrize("name", ["swap", "session"])
def test_wrong_copy_is_broken(name, monkeypatch, checkpoint, capsys):
    copy_in = HostCopier.copy_in

    def copy_in_flipped(self, key, held, copies):
        return copy_in(self, key, held, [copy.flip(0) for copy in copies])

    if name == "swap":
        monkeypatch.setattr(HostCopier, "copy_in", copy_in_flipped)
    else:
        monkeypatch.setattr(PendingRestore, "restore", lambda *_: None)
    options = ["--cache-dtype", "float64", "--no-preempt", "--layout", "paged", "--round-trip", name]
    assert main(["verify", checkpoint, *FLAGS, *options]) == 1
    assert f"broken (paged float64 through {name})" in capsys.readouterr().out


def test_printed_page_and_json(checkpoint, capsys):
    command = ["verify", checkpoint, *FLAGS, "--cache-dtype", "float64", "--round-trip", "swap-disk,prefix-disk"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert re.search(r"paged float64 +swap-disk +\S+ +[\d,]+ bytes +exact", out)
    skipped = "skipped    contiguous float64, round trip prefix-disk: "
    assert f"{skipped}cache.prefix_cache_dir: a contiguous cache shares no blocks" in out
    assert main([*command, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["round_trips"]
    assert {result["round_trip"] for result in results} == {"swap-disk", "prefix-disk"} and len(results) == 4
    (skipped,) = [result for result in results if result["verdict"] == "skipped"]
    assert skipped["max_dlogit"] is None and skipped["moved"] == 0


def test_unknown_name_is_refused():
    with pytest.raises(UsageError, match="'disc' is no round trip"):
        run_verify(tiny_model(), round_trips=("disc",))


def test_help_lists_every_round_trip():
    assert tuple(ROUND_TRIPS) == verify.ROUND_TRIP_NAMES

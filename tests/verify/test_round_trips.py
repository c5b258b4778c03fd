"""``kvad verify --round-trip``: rows that leave the cache and come back are judged like those that stay."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from kvad.cache.device.host_copy import HostCopier
from kvad.cache.sessions.state import PendingRestore
from kvad.checkpoint.native import save_checkpoint
from kvad.cli.commands import verify
from kvad.cli.main import main
from kvad.errors import UsageError
from kvad.verify import round_trips
from kvad.verify.report import EXACT
from tests.verify.test_verify import OPTIONS, run, tiny

ALL = dataclasses.replace(OPTIONS, round_trips=tuple(round_trips.ROUND_TRIPS), dtypes=("float64",))
SMALL = ["--num-prompts", "3", "--prefill-chunk-size", "8", "--block-size", "4", "--max-tokens", "8"]
SMALL += ["--cache-dtype", "float64"]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model = tmp_path_factory.mktemp("m") / "model", tiny()
    save_checkpoint(folder, model.config, model.state_dict(), None)
    return folder


def test_every_way_is_exact_and_was_taken() -> None:
    report = run(tiny(), ALL)
    found = {(each.memory, each.round_trip): each for each in report.round_trips}
    for way in round_trips.ROUND_TRIPS:
        each = found["paged float64", way]
        assert each.verdict == "exact" and each.moved > 0 and each.max_dlogit <= EXACT, each
    assert found["contiguous float64", "swap"].verdict == "exact"
    assert found["contiguous float64", "prefix-disk"].reason.startswith(
        "cache.prefix_cache_dir: a contiguous cache shares no blocks"
    )
    assert not report.broken and any(rule.startswith("round trip:") for rule in report.rules)


def test_policies_and_formats_go_that_way_or_say_why_not() -> None:
    policies = ("heavy-hitters(8, interval=4)", "offload(8, interval=4)")
    options = dataclasses.replace(ALL, layouts=("paged",), dtypes=("int8",), policies=policies)
    report = run(tiny(), options)
    said = {(each.memory.split()[2].partition("(")[0], each.round_trip): each for each in report.round_trips}
    assert said["heavy-hitters", "session"].verdict == said["heavy-hitters", "swap"].verdict == "exact"
    assert "shares no blocks" in said["heavy-hitters", "prefix-ram"].reason
    assert "keep_state, resume: unavailable with token offload" in said["offload", "session"].reason
    assert said["offload", "swap"].verdict == "recomputed" and said["offload", "offload-disk"].verdict == "exact"


def test_nothing_leaves_unless_it_is_asked_for() -> None:
    report = run(tiny(), dataclasses.replace(ALL, round_trips=()))
    assert report.round_trips == () and not any(rule.startswith("round trip:") for rule in report.rules)


@pytest.mark.parametrize("wrong", ["parked", "session"])
def test_what_comes_back_wrong_is_broken(wrong: str, monkeypatch: pytest.MonkeyPatch, folder: Path, capsys) -> None:
    if wrong == "parked":
        back = HostCopier.copy_in
        monkeypatch.setattr(
            HostCopier,
            "copy_in",
            lambda self, key, held, copies: back(self, key, held, [each.flip(0) for each in copies]),
        )
    else:
        monkeypatch.setattr(PendingRestore, "restore", lambda *_: None)
    way = "swap" if wrong == "parked" else "session"
    assert main(["verify", str(folder), *SMALL, "--no-preempt", "--layout", "paged", "--round-trip", way]) == 1
    out = capsys.readouterr().out
    assert f"broken (paged float64 through {way})" in out


def test_the_page_and_its_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["verify", str(folder), *SMALL, "--round-trip", "swap-disk,prefix-disk"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert re.search(r"paged float64 +swap-disk +\S+ +[\d,]+ bytes +exact", out)
    skipped = "skipped    contiguous float64, round trip prefix-disk: "
    assert f"{skipped}cache.prefix_cache_dir: a contiguous cache shares no blocks" in out
    assert main([*asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["round_trips"]
    assert {each["round_trip"] for each in said} == {"swap-disk", "prefix-disk"} and len(said) == 4
    skipped = next(each for each in said if each["verdict"] == "skipped")
    assert skipped["max_dlogit"] is None and skipped["moved"] == 0


def test_errors_name_the_way(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder), "--round-trip", "prefix-disc"]) == 2
    err = capsys.readouterr().err
    assert "--round-trip: 'prefix-disc' is not known" in err and "did you mean 'prefix-disk'?" in err
    assert main(["verify", str(folder), *SMALL, "--round-trip", "swap", "--inject-fault", "mask"]) == 2
    assert "--inject-fault and --round-trip" in capsys.readouterr().err
    with pytest.raises(UsageError, match="'disc' is no round trip"):
        run(tiny(), dataclasses.replace(OPTIONS, round_trips=("disc",)))


def test_help_lists_what_there_is() -> None:
    assert tuple(round_trips.ROUND_TRIPS) == verify.ROUND_TRIP_NAMES

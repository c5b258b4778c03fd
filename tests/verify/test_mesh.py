"""``kvad verify --mesh``: ranks that it starts itself, the fault of a rank with another rank's heads, and refusals."""

import json
import subprocess

import psutil
import pytest
import torch

from kvad import parallel
from kvad.cli.main import main
from kvad.config.model import attention_specs
from kvad.engine import EngineConfig
from kvad.errors import EngineError, UsageError
from kvad.model.summarizer import Summarizer
from kvad.verify import mesh
from kvad.verify.report import EXACT
from tests.support.mesh_cases import pair
from tests.support.random_models import build
from tests.support.verify_models import FLAGS, run_verify, tiny_model

PAGED = (*FLAGS, "--layout", "paged", "--cache-dtype", "float32")


def ranks():
    """Return the processes of other ranks that this process started."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "kvad.verify.mesh" in child.cmdline()]


def test_a_mesh_is_exact_and_its_ranks_end(checkpoint, capsys):
    assert main(["verify", checkpoint, *PAGED, "--mesh", "2x1", "--json"]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert case["verdict"] == "exact" and case["structure"] <= 1e-10
    assert case["scenario_counts"]["preemptions"] and case["scenario_counts"]["hit_tokens"]
    assert ranks() == []


def test_the_heads_of_another_rank_are_named(checkpoint, capsys):
    assert main(["verify", checkpoint, *PAGED, "--mesh", "2x1", "--inject-fault", "rank-heads", "--json"]) == 1
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert (case["verdict"], case["finding"]["fault"], case["finding"]["layer"]) == ("broken", "rank-heads", 0)
    assert case["finding"]["evidence"] == "the keys of head 1, on rank 1, are those of head 0, on rank 0"
    assert ranks() == []


def test_the_heads_of_another_rank_are_named_behind_an_encoder():
    """The first step is the encoder's, and a block store is not part of the diagnosis."""
    options = {"layouts": ("paged",), "prefix_cache_ram": 1 << 20, "mesh": parallel.Mesh(2, 1)}
    (case,) = run_verify(build(pair()), fault="rank-heads", **options).cases
    assert (case.verdict, case.finding.fault) == ("broken", "rank-heads")


def test_beams_round_trips_and_block_stores_on_a_mesh(checkpoint, capsys):
    """An engine that a mesh refuses is reported with its reason, and the next one runs."""
    options = ("--dtype", "float64", "--round-trip", "all", "--num-beams", "2", "--prefix-cache-ram", "1MiB")
    assert main(["verify", checkpoint, *FLAGS, *options, "--layout", "paged", "--mesh", "2x1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (case,) = report["cases"]
    assert case["verdict"] == "exact" and case["scenario_counts"]["loaded"] > 0
    results = {result["round_trip"]: result for result in report["round_trips"]}
    for name in ("offload-disk", "offload", "swap-disk", "swap", "prefix-ram", "prefix-disk", "session", "2 beams"):
        verdict, moved, reason = (results[name][field] for field in ("verdict", "moved", "reason"))
        if name.startswith("offload"):
            assert verdict == "skipped" and reason.startswith("cache.overflow: must not be offload on a mesh of 2x1")
        elif name == "swap-disk":
            assert verdict == "skipped" and reason.startswith("swap_dir: unavailable with 2 ranks")
        else:
            assert (verdict, reason) == ("exact", "") and moved > 0 and results[name]["max_dlogit"] <= EXACT, name
    assert ranks() == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_sent", [True, False])
def test_ranks_use_the_trained_summarizer(monkeypatch, is_sent):
    """A rank without it has other summaries than one process."""
    model = tiny_model().double()
    summarizer = Summarizer(attention_specs(model.config), 2, hidden=4)
    untrained = {name: tensor.clone() for name, tensor in summarizer.state_dict().items()}
    for parameter in summarizer.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    if not is_sent:
        monkeypatch.setattr(Summarizer, "state_dict", lambda self: untrained)
        monkeypatch.setattr(Summarizer, "to", lambda self, _device: self)
    options = {"policies": ("tiered(8, quantized=8, interval=8, summaries=8, ratio=2)",), "layouts": ("paged",)}
    config = EngineConfig(summarizer=summarizer)
    (case,) = run_verify(model, config=config, mesh=parallel.Mesh(2, 1), num_seqs=2, **options).cases
    if is_sent:
        assert case.verdict == "lossy by design" and case.structure <= EXACT
    else:
        assert case.verdict == "broken" and "from the same sequence alone" in case.reason


def test_a_wrong_sum_over_ranks_is_found(monkeypatch):
    """The keys of layer 0 are right; those of layer 1 are computed from a wrong sum."""
    add = parallel.process_groups.ProcessGroups.sum
    monkeypatch.setattr(parallel.process_groups.ProcessGroups, "sum", lambda self, x: 1.01 * add(self, x))
    options = {"layouts": ("paged",), "dtypes": ("float64",), "preempt": False, "prefix_hit": False}
    (case,) = run_verify(tiny_model().double(), mesh=parallel.Mesh(2, 1), **options).cases
    assert case.verdict == "broken" and (case.finding.fault, case.finding.layer) == ("unknown", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mesh", "3x1"), "3 ranks cannot evenly divide"),
        (("--mesh", "two"), "must be TENSORxPIPELINE"),
        (("--mesh", "2x1", "--deterministic"), "deterministic: is not supported on a mesh of 2x1"),
        (("--mesh", "2x1", "--compile"), "compile: is not supported on a mesh of 2x1"),
        (("--mesh", "2x1", "--inject-fault", "mask"), "it is injected into one process, not a mesh of 2x1"),
        (("--mesh", "1x2", "--inject-fault", "rank-heads"), "this engine has one tensor rank"),
        (("--inject-fault", "rank-heads"), "this engine has one tensor rank"),
    ],
)
def test_what_a_mesh_does_not_do_is_refused_before_ranks_start(checkpoint, capsys, monkeypatch, options, message):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a rank was started"))
    assert main(["verify", checkpoint, *PAGED, *options]) == 2
    assert message in capsys.readouterr().err


def test_ranks_run_on_a_cpu():
    with pytest.raises(UsageError, match="--device: must be cpu with --mesh 2x1"):
        mesh.check_mesh(tiny_model().to("meta"), parallel.Mesh(2, 1), EngineConfig())


def test_a_rank_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(mesh.sys, "executable", "/bin/false")
    monkeypatch.setattr(mesh, "CONNECT_SECONDS", 1.0)
    with pytest.raises(EngineError, match="a rank of the mesh of 2x1 did not start"):
        mesh.MeshRanks(parallel.Mesh(2, 1), [tiny_model()])
    assert ranks() == []


def test_every_head_and_rank_is_named():
    ranks_of = mesh.MeshRanks.__new__(mesh.MeshRanks)
    ranks_of.mesh = parallel.Mesh(2, 1)
    true = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0)).double()
    assert ranks_of._wrong_heads(0, "k", true.clone(), true, 1e-9) is None
    moved = true[[0, 1, 0, 1]]
    assert (
        "head 2, on rank 1, are those of head 0, on rank 0" in ranks_of._wrong_heads(0, "k", moved, true, 1e-9).evidence
    )
    noise = ranks_of._wrong_heads(3, "v", true + 0.1, true, 1e-9)
    assert (noise.fault, noise.layer) == ("unknown", 3) and "the values of head 0" in noise.evidence

"""``kvad verify --mesh``: ranks that it starts itself, the fault of a rank with another rank's heads, and refusals."""

import json
import subprocess

import psutil
import pytest
import torch

from kvad import parallel
from kvad.cli.main import main
from kvad.errors import EngineError
from kvad.verify import mesh
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
        (("--mesh", "2x1", "--num-beams", "2"), "--num-beams: cannot be combined with --mesh 2x1"),
        (("--mesh", "2x1", "--round-trip", "swap"), "--round-trip: cannot be combined with --mesh 2x1"),
        (("--mesh", "2x1", "--prefix-cache-ram", "1MiB"), "--prefix-cache-ram: cannot be combined with --mesh 2x1"),
        (("--mesh", "2x1", "--deterministic"), "deterministic: is not supported on a mesh of 2x1"),
        (("--mesh", "2x1", "--inject-fault", "mask"), "it is injected into one process, not a mesh of 2x1"),
        (("--mesh", "1x2", "--inject-fault", "rank-heads"), "this engine has one tensor rank"),
        (("--inject-fault", "rank-heads"), "this engine has one tensor rank"),
    ],
)
def test_what_a_mesh_does_not_do_is_refused_before_ranks_start(checkpoint, capsys, monkeypatch, options, message):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a rank was started"))
    assert main(["verify", checkpoint, *PAGED, *options]) == 2
    assert message in capsys.readouterr().err


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

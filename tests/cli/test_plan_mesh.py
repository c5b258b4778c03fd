"""``kvad plan --mesh``: each rank's bytes, as a page and as JSON, and what is refused."""

from __future__ import annotations

import json

import pytest

from kvad.cache.config import CacheConfig
from kvad.cache.sizing.memory_plan import plan_memory
from kvad.cli.main import main
from kvad.parallel.mesh import Mesh
from kvad.parallel.partition import plan_ranks
from kvad.planning.known_models import known_model

ASKED = ("llama-3-8b", "--max-seq-len", "8192", "--max-num-seqs", "2", "--dtype", "bfloat16", "--bandwidth", "20")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    seen = capsys.readouterr()
    return code, seen.out, seen.err


def test_json_and_page_say_each_ranks_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_memory(
        known_model("llama-3-8b"),
        CacheConfig(max_num_seqs=2, max_seq_len=8192, dtype="bfloat16"),
        weights_dtype="bfloat16",
    )
    ranks = plan_ranks(plan, Mesh(4, 2))
    code, out, err = run(capsys, *ASKED, "--mesh", "4x2", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)["ranks"]
    assert [each["bytes"]["total"] for each in found] == [rank.total for rank in ranks]
    assert found[5] == {
        "rank": 5,
        "tensor_rank": 1,
        "stage": 1,
        "layers": list(range(16, 32)),
        "bytes": {name: getattr(ranks[5], name) for name in found[5]["bytes"]},
    }
    assert sum(each["bytes"]["payload"] for each in found) == plan.payload * 1026 // 1024, "with what is reserved"
    code, out, err = run(capsys, *ASKED, "--mesh", "4x2")
    assert (code, err) == (0, "")
    assert "a mesh of 4x2, exact:" in out and "GB/s" not in out and max(map(len, out.splitlines())) <= 120
    for rank in ranks:
        assert f"{rank.weights:,}" in out and f"{rank.pool:,}" in out and f"{rank.total:,}" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mesh", "3x1"], "tensor ranks that fit this model: 1, 2, 4, 8, 16, 32"),
        (["--mesh", "1x64"], "use at most 32 stages"),
        (["--mesh", "two"], "must be TENSORxPIPELINE, got 'two'"),
        (["--mesh", "2x1", "--fit-memory", "24GiB"], "give one of them"),
        (["--mesh", "16x1", "--policy", "tova(64)"], "at most 8 tensor ranks"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *ASKED, *arguments)
    assert code == 2 and out == "" and says in err


def test_without_a_mesh_there_are_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *ASKED, "--json")
    assert code == 0 and json.loads(out)["ranks"] == []

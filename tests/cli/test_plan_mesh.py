"""``kvad plan --mesh``: each rank's bytes as text and as JSON, and invalid meshes."""

import json

import pytest

from kvad.cache.config import CacheConfig
from kvad.cache.sizing.memory_plan import plan_memory
from kvad.parallel.mesh import Mesh
from kvad.parallel.partition import plan_ranks
from kvad.planning.known_models import known_model

pytestmark = pytest.mark.usefixtures("much_memory")
PLAN = "plan llama-3-8b --max-seq-len 8192 --max-num-seqs 2 --dtype bfloat16 --bandwidth 20"


def test_bytes_of_each_rank(kvad):
    cache = CacheConfig(max_num_seqs=2, max_seq_len=8192, dtype="bfloat16")
    plan = plan_memory(known_model("llama-3-8b"), cache, weights_dtype="bfloat16")
    ranks = plan_ranks(plan, Mesh(4, 2))
    result = kvad(f"{PLAN} --mesh 4x2 --json")
    assert (result.code, result.err) == (0, "")
    records = json.loads(result.out)["ranks"]
    assert [each["bytes"]["total"] for each in records] == [rank.total for rank in ranks]
    sizes = {name: getattr(ranks[5], name) for name in records[5]["bytes"]}
    assert records[5] == {"rank": 5, "tensor_rank": 1, "stage": 1, "layers": list(range(16, 32)), "bytes": sizes}
    reserved = plan.payload * 1026 // 1024  # with the reserved blocks
    assert sum(each["bytes"]["payload"] for each in records) == reserved
    result = kvad(f"{PLAN} --mesh 4x2")
    assert (result.code, result.err) == (0, "")
    assert "a mesh of 4x2, exact:" in result.out and "GB/s" not in result.out
    assert max(map(len, result.out.splitlines())) <= 120
    for rank in ranks:
        assert all(f"{size:,}" in result.out for size in (rank.weights, rank.pool, rank.total))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mesh 3x1", "tensor ranks that fit this model: 1, 2, 4, 8, 16, 32"),
        ("--mesh 1x64", "use at most 32 stages"),
        ("--mesh two", "must be TENSORxPIPELINE, got 'two'"),
        ("--mesh 2x1 --fit-memory 24GiB", "give one of them"),
        ("--mesh 2x1 --draft-model smollm-135m", "speculative: a draft model is not supported with 2 ranks"),
        ("--mesh 1x2 --adapter sql=runs/sql", "adapters: requests cannot choose one with 2 ranks"),
        ("--mesh 16x1 --policy 'tova(64)'", "at most 8 tensor ranks"),
    ],
)
def test_invalid_meshes(kvad, flags, message):
    result = kvad(f"{PLAN} {flags}")
    assert result.code == 2 and result.out == "" and message in result.err


def test_plan_without_a_mesh_has_no_ranks(kvad):
    result = kvad(f"{PLAN} --json")
    assert result.code == 0 and json.loads(result.out)["ranks"] == []


def test_a_draft_model_of_one_rank_is_counted(kvad):
    """One rank has what an engine has; n-grams add only rows of logits, on any mesh."""
    plan = "plan smollm-135m --max-seq-len 512 --dtype bfloat16 --bandwidth 20"
    report = json.loads(kvad(f"{plan} --mesh 1x1 --draft-model smollm-135m --json").out)["bytes"]
    assert report["draft_bytes"] > report["weights"]
    lines = kvad(f"{plan} --mesh 1x1 --draft-model smollm-135m").out
    shared = sum(report[name] for name in ("scratch", "activations", "draft_bytes"))
    assert f"{shared:,} for a step, adapters and a draft model" in lines
    ngrams = kvad(f"{plan} --mesh 3x1 --speculative ngram")
    assert ngrams.code == 0 and "for a step: as for the whole model" in ngrams.out

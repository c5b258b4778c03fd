"""``kvad verify --against hf``: transformers' caches, intact and broken."""

import json
import sys

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicLayer

from kvad.cli.main import main
from tests.hf_parity import checkpoint
from tests.support.verify_models import FLAGS

COMMAND = (*FLAGS, "--against", "hf")


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory):
    return build_folder(tmp_path_factory.mktemp("hf") / "llama")


def build_folder(folder, **options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        **options,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    model.save_pretrained(folder)
    return str(folder)


def verified(folder, capsys, *options):
    code = main(["verify", folder, *COMMAND, *options, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert code == int(result["broken"])
    return {case["dtype"]: case for case in result["cases"]}, result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_intact_caches_are_within_the_tolerance(hf_folder, capsys, dtype):
    cases, result = verified(hf_folder, capsys, "--dtype", dtype)
    assert {cases[name]["verdict"] for name in ("none", "DynamicCache", "StaticCache")} == {"within tolerance"}
    assert "QuantizedCache" in cases or result["skipped"][0]["memory"] == "transformers QuantizedCache"


def test_sequences_that_exceed_the_original_length_are_recomputed(tmp_path, capsys, monkeypatch):
    """As ``generate`` of transformers does; without it the cached keys have the frequencies of shorter sequences."""
    scaling = {"rope_type": "longrope", "factor": 6.0, "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
    folder = build_folder(tmp_path / "llama", rope_scaling=scaling, original_max_position_embeddings=16)
    cases, _ = verified(folder, capsys, "--prefill-chunk-size", "8")
    assert {cases[name]["verdict"] for name in ("none", "DynamicCache", "StaticCache")} == {"within tolerance"}
    monkeypatch.setattr("kvad.verify.hf_caches._Comparison._first_chunk", lambda *_: 0)
    assert verified(folder, capsys, "--prefill-chunk-size", "8")[0]["DynamicCache"]["verdict"] == "broken"


def break_update(monkeypatch, change):
    update = DynamicLayer.update

    def wrong(self, keys, values, *rest):
        return update(self, *change(self, keys, values), *rest)

    monkeypatch.setattr(DynamicLayer, "update", wrong)


@pytest.mark.parametrize(
    ("fault", "change"),
    [
        ("dtype", lambda layer, keys, values: (keys.bfloat16().float(), values)),
        ("cursor", lambda layer, keys, values: (torch.cat([keys[:, :, 1:], keys[:, :, -1:]], dim=2), values)),
        ("unknown", lambda layer, keys, values: (keys.roll(1, dims=2), values)),
        ("unknown", lambda layer, keys, values: (keys, values + 0.5)),
    ],
)
def test_broken_cache_is_named(hf_folder, capsys, monkeypatch, fault, change):
    break_update(monkeypatch, change)
    cases, _ = verified(hf_folder, capsys)
    assert cases["DynamicCache"]["verdict"] == "broken" and cases["StaticCache"]["verdict"] != "broken"
    assert cases["DynamicCache"]["finding"]["fault"] == fault, cases["DynamicCache"]["finding"]


def test_checkpoint_of_kvad_is_exported_first(checkpoint, capsys):
    cases, _ = verified(checkpoint, capsys)
    assert cases["DynamicCache"]["verdict"] == "within tolerance"


def test_missing_transformers_is_one_line(hf_folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["verify", hf_folder, *COMMAND]) == 2
    assert capsys.readouterr().err == (
        "kvad: error: --against hf: transformers is not installed\nkvad: hint: pip install transformers\n"
    )


def test_latent_attention_is_refused(capsys, tmp_path):
    meta, arrays = checkpoint.load("5", "deepseek-v2-lite")
    assert main(["verify", str(checkpoint.write(meta, arrays, tmp_path)), *COMMAND]) == 2
    assert "--against hf: is not supported for latent attention" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("--inject-fault", "mask"), "inject_fault"),
        (("--policy", "sinks"), "policies"),
        (("--cache-dtype", "int8"), "cache_dtypes"),
        (("--layout", "paged"), "layouts"),
        (("--mesh", "2x1"), "mesh"),
        (("--deterministic",), "deterministic"),
        (("--no-preempt",), "preempt"),
        (("--round-trip", "swap"), "round_trips"),
    ],
)
def test_options_of_the_engine_are_refused(hf_folder, capsys, options, name):
    assert main(["verify", hf_folder, "--against", "hf", *options]) == 2
    assert f"against: {name} has no meaning for transformers' caches" in capsys.readouterr().err

"""Options of ``kvad verify``: each reaches the engine, the intact one passes, and a planted error is found."""

import json

import pytest
import torch

from kvad.checkpoint import open_checkpoint
from kvad.checkpoint.adapter import adapter_format, base_fingerprint, save_adapter
from kvad.checkpoint.summarizer import sampled_fingerprint, save_summarizer
from kvad.cli.main import main
from kvad.config.model import attention_specs
from kvad.engine import Engine
from kvad.model.lora import LoraFactors
from kvad.model.summarizer import Summarizer
from kvad.ops import linear
from tests.support.verify_models import FLAGS

PAGED = (*FLAGS, "--layout", "paged", "--cache-dtype", "float32")
SUMMARIES = ("--policy", "tiered(8, quantized=8, interval=8, summaries=8, ratio=2)")


@pytest.fixture(scope="session")
def adapter(checkpoint, tmp_path_factory):
    handle, folder = open_checkpoint(checkpoint), tmp_path_factory.mktemp("adapter") / "lora"
    generator = torch.Generator().manual_seed(0)
    names = [name for name, tensor in handle.weights() if tensor.dim() == 2 and ".attention." in name]
    shapes = {name.removesuffix(".weight"): tensor.shape for name, tensor in handle.weights() if name in names}
    factors = {
        name: LoraFactors(torch.randn(2, i, generator=generator), torch.randn(o, 2, generator=generator) * 0.2, 1.0)
        for name, (o, i) in shapes.items()
    }
    form = adapter_format(handle, checkpoint, base_fingerprint(handle))
    save_adapter(folder, form, factors, rank=2, alpha=2.0, use_rslora=False, dropout=0.0)
    return str(folder)


@pytest.fixture(scope="session")
def summarizer(checkpoint, tmp_path_factory):
    handle, folder = open_checkpoint(checkpoint), tmp_path_factory.mktemp("summarizer") / "trained"
    torch.manual_seed(0)
    trained = Summarizer(attention_specs(handle.config), 2, hidden=4)
    tensors = {name: torch.randn_like(tensor) * 0.3 for name, tensor in trained.state_dict().items()}
    save_summarizer(folder, tensors, sampled_fingerprint(handle), {"ratio": 2, "hidden_size": 4})
    return str(folder)


@pytest.fixture
def run(checkpoint, capsys):
    """``run(*options)``: the exit code, and the report or the error."""

    def call(*options):
        code = main(["verify", checkpoint, *PAGED, *options, "--json"])
        output = capsys.readouterr()
        return code, json.loads(output.out) if output.out else output.err

    return call


@pytest.fixture
def engines(monkeypatch):
    """The configurations of all engines that are built."""
    seen, build = [], Engine.__init__

    def record(self, model, cache, config=None, **options):
        seen.append((model, cache, config))
        build(self, model, cache, config, **options)

    monkeypatch.setattr(Engine, "__init__", record)
    return seen


OPTIONS = {
    "--adapter": ("packed", "exact"),
    "--memory": ("cursor", "exact"),
    "--device": ("table", "exact"),
    "--deterministic": ("packed", "exact"),
    "--compile": ("cursor", "exact"),
    "--summarizer": ("summary", "lossy by design"),
    "--prefix-cache-ram": ("block-store", "exact"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_intact_engine_passes_and_a_fault_is_named(run, adapter, summarizer, option):
    values = {
        "--adapter": (adapter,),
        "--memory": ("1GiB",),
        "--device": ("cpu",),
        "--deterministic": (),
        "--compile": (),
        "--summarizer": (summarizer, *SUMMARIES),
        "--prefix-cache-ram": ("1MiB",),
    }
    fault, verdict = OPTIONS[option]
    code, report = run(option, *values[option])
    assert code == 0 and [case["verdict"] for case in report["cases"]] == [verdict]
    code, report = run(option, *values[option], "--inject-fault", fault)
    assert code == 1 and [case["finding"]["fault"] for case in report["cases"]] == [fault]


def test_the_engine_has_the_adapter(run, adapter):
    plain, merged = run()[1], run("--adapter", adapter)[1]
    assert merged["logit_scale"] != plain["logit_scale"]


def test_a_wrong_value_in_a_packed_weight_is_found(run, adapter, monkeypatch):
    pack = linear.PackedLinear.pack

    def wrong(self, *layers):
        pack(self, *layers)
        self._weight[0, 0] += 0.5

    monkeypatch.setattr(linear.PackedLinear, "pack", wrong)
    for options in ((), ("--adapter", adapter), ("--deterministic",)):
        code, report = run(*options)
        assert code == 1 and report["cases"][0]["finding"]["fault"] == "packed", options


def test_a_lossy_policy_with_a_block_store_is_compared_with_runs_without_it(run):
    code, report = run("--prefix-cache-ram", "1MiB", "--policy", "quest(8)")
    assert code == 0 and [case["verdict"] for case in report["cases"]] == ["lossy by design"], report


def test_options_reach_every_engine(run, engines, summarizer):
    run("--deterministic", "--device", "cpu", "--summarizer", summarizer, *SUMMARIES, "--prefix-cache-ram", "1MiB")
    for model, cache, config in engines:
        assert config.deterministic and config.summarizer is not None and model.token_embedding.device.type == "cpu"
        assert cache.prefix_cache_ram in (1 << 20, None)
    assert {cache.prefix_cache_ram for _, cache, _ in engines} >= {1 << 20}


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--memory", "1MiB"), 2, "and 1.00 MiB is available"),
        (("--device", "cuda:99"), 2, "cuda:99"),
        (("--adapter", "nowhere"), 2, "nowhere"),
        (("--summarizer", "nowhere"), 2, "nowhere"),
        (("--prefix-cache-ram", "0"), 2, "prefix-cache-ram"),
        (("--prefix-cache-ram", "1MiB", "--layout", "contiguous"), 2, "a contiguous cache shares no blocks"),
    ],
)
def test_impossible_values_are_refused(run, options, code, message):
    found, error = run(*options)
    assert found == code and message in error

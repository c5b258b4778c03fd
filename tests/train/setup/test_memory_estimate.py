"""Memory estimate of training, compared with what autograd saves."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvad.config import AttentionConfig, GatedDeltaConfig
from kvad.errors import MemoryPlanError, format_bytes
from kvad.model.transformer import Transformer
from kvad.ops import cross_entropy
from kvad.train.config.presets import MODEL_PRESETS
from kvad.train.config.run import CallbacksConfig, RunConfig
from kvad.train.loop.trainer import apply_acceleration
from kvad.train.optim.optimizer import OptimizersContainer
from kvad.train.setup.memory_estimate import LOGIT_CHUNK_ELEMENTS, MemoryEstimate, translate_oom
from tests.support.lab_models import CONFIGS, tiny
from tests.support.training_runs import packed_input, saved_bytes

ROWS, CONTEXT = 4, 64
RUN = RunConfig.from_dict({"data": {"seq_len": CONTEXT}, "train": {"batch_size": ROWS}})


def bytes_of(model, precision="fp32"):
    return saved_bytes(model, packed_input(model.config, ROWS, CONTEXT), precision)


def activations(config, half=False):
    """The estimate without state, rows, logits and the copies under bf16."""
    logits = 8 * min(ROWS * CONTEXT * config.vocab_size, LOGIT_CHUNK_ELEMENTS)
    return MemoryEstimate(config, RUN, 0, half=half).total(ROWS) - 48 * ROWS * CONTEXT - logits


@pytest.mark.parametrize("name", CONFIGS)
def test_estimate_is_near_what_autograd_saves(name):
    saved = bytes_of(Transformer(CONFIGS[name]), "fp32")
    assert saved / 1.5 <= activations(CONFIGS[name]) <= 1.25 * saved


@pytest.mark.parametrize("mixer", [AttentionConfig(4, output_gate=True), GatedDeltaConfig(2, 4, 8, 8)], ids=type)
def test_estimate_of_gates_and_states_is_near_what_autograd_saves(mixer):
    saved = bytes_of(Transformer(tiny(mixer)), "fp32")
    assert saved / 1.5 <= activations(tiny(mixer)) <= 1.25 * saved


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("preset", "source_rows"), [("tiny", 0), ("transformer-tiny", 32 * ROWS * CONTEXT)])
def test_estimate_of_a_preset_is_near_what_autograd_saves(preset, source_rows, precision):
    config, half = MODEL_PRESETS[preset](256, CONTEXT), precision == "bf16"
    model = Transformer(config)
    copies = 2 * sum(p.numel() for p in model.parameters()) if half else 0
    saved = bytes_of(model, precision) - copies
    estimate = activations(config, half) - source_rows
    assert saved / 1.25 <= estimate <= 1.1 * saved, (saved, estimate)


@pytest.mark.parametrize("name", ["plain", "gated bias", "pattern", "t5"])
def test_estimate_with_frozen_weights_is_near_what_autograd_saves(name):
    from kvad.checkpoint.peft import match_targets
    from kvad.model.lora import add_adapters

    model = Transformer(CONFIGS[name])
    add_adapters(model, match_targets(CONFIGS[name], ["q", "v"]), 2, 1.0)
    saved = bytes_of(model, "fp32")
    logits = 8 * min(ROWS * CONTEXT * CONFIGS[name].vocab_size, LOGIT_CHUNK_ELEMENTS)
    estimate = MemoryEstimate(CONFIGS[name], RUN, 0, trained=0).total(ROWS) - 48 * ROWS * CONTEXT - logits
    assert saved / 1.5 <= estimate <= 1.25 * saved


def test_state_rows_and_copies_are_counted():
    def total(parameters, run=RUN, **options):
        return MemoryEstimate(CONFIGS["plain"], run, parameters, **options).total(ROWS)

    plain = total(0)
    assert total(1000) - plain == 16_000 + 12_000
    assert total(1000, trained=10) - total(0, trained=0) == 4_000 + 120 + 120
    assert total(1000, half=True) - total(0, half=True) == 30_000
    assert total(1000, replace(RUN, train=replace(RUN.train, async_save=False))) - plain == 16_000
    accumulated = replace(RUN, train=replace(RUN.train, gradient_accumulation_steps=3))
    assert total(0, accumulated) - plain == 2 * 48 * ROWS * CONTEXT


@pytest.mark.parametrize(
    ("tables", "each", "num_tables"),
    [
        ({}, 16, 0),
        ({"optim": {"name": "adafactor"}}, 8, 0),
        ({"optim": {"name": "adafactor", "beta1": 0.9}}, 12, 0),
        ({"optim": {"ema_decay": 0.9}}, 20, 0),
        ({"optim": {"average_last": 5, "average_interval": 9}}, 36, 0),
        ({"optim": {"name": "muon"}}, 12, 1),
    ],
)
def test_optimizer_state_is_counted(tables, each, num_tables):
    """Compared with the tensors after a step: never more than these, and at least 90%."""
    run = RunConfig.from_dict({"data": {"seq_len": CONTEXT}, **tables})
    config = CONFIGS["plain"]
    assert (
        MemoryEstimate(config, run, 1000).state == each * 1000 + num_tables * 4 * config.vocab_size * config.hidden_size
    )
    model = Transformer(config)
    parameters = sum(p.numel() for p in model.parameters())
    optimization = OptimizersContainer(model, run.optim, run.train)
    for step in range(1 if "average_last" not in tables.get("optim", {}) else 45):
        optimization.begin_step(step, 0.0)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimization.step(optimization.clip_grad_norm())
    stored = sum(tensor.nbytes for name, tensor in optimization.state_tensors().items() if not name.startswith("raw."))
    stored += 8 * parameters  # weights and gradients
    assert 0.9 * stored <= MemoryEstimate(config, run, parameters).state <= stored
    written = 4 * parameters + sum(tensor.nbytes for tensor in optimization.state_tensors().values())
    assert 0.9 * written <= MemoryEstimate(config, run, parameters).parts(ROWS)["copy"] <= written


@pytest.mark.parametrize("name", CONFIGS)
def test_estimate_with_activation_checkpointing(name):
    """Inputs of all layers, and the activations of one."""
    config = CONFIGS[name]
    run = replace(RUN, train=replace(RUN.train, activation_checkpointing=True))
    plain = MemoryEstimate(config, RUN, 0).total(ROWS)
    again = MemoryEstimate(config, run, 0).total(ROWS)
    layers = config.decoder.num_layers
    assert again < plain
    if len(config.decoder.layer_types) == 1:
        one = replace(config, decoder=replace(config.decoder, num_layers=1))
        stream = 4 * ROWS * CONTEXT * config.hidden_size
        assert again - layers * stream == MemoryEstimate(one, RUN, 0).total(ROWS)
    model = Transformer(config).train()
    apply_acceleration(model, run.train)
    saved = bytes_of(model, "fp32")
    assert layers * 4 * ROWS * CONTEXT * config.hidden_size <= saved < bytes_of(Transformer(config), "fp32")


def test_logit_chunk_equals_that_of_cross_entropy():
    assert LOGIT_CHUNK_ELEMENTS == cross_entropy.CHUNK_ELEMENTS


def of_batch(batch):
    return RunConfig.from_dict({"data": {"seq_len": CONTEXT}, "train": {"batch_size": batch}})


@pytest.mark.parametrize("most", [1, 2, 7, 500])
def test_the_largest_fitting_micro_batch_is_named(most):
    config = CONFIGS["plain"]
    have = MemoryEstimate(config, RUN, 5000).total(most)
    MemoryEstimate(config, of_batch(most), 5000).require(have)
    with pytest.raises(MemoryPlanError, match=rf"This fits: --batch-size {most} ") as caught:
        MemoryEstimate(config, of_batch(1000), 5000).require(have)
    assert "training on 1,000 rows of 64 tokens at a time needs about" in caught.value.message
    assert f"and {format_bytes(have)} is available" in caught.value.message and caught.value.exit_code == 1
    MemoryEstimate(config, of_batch(1000), 5000).require(None)  # unknown


def test_error_if_no_batch_fits():
    with pytest.raises(MemoryPlanError, match="Not even --batch-size 1 fits") as caught:
        MemoryEstimate(CONFIGS["plain"], of_batch(1), 5000).require(80_000)
    assert "1 row of 64 tokens" in caught.value.message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_demo_fits_in_half_a_gibibyte(precision):
    """``kvad demo``: 4 rows of 256 tokens of the demo preset, on a machine with half a gibibyte left."""
    config = MODEL_PRESETS["demo"](4096, 256)
    demo = RunConfig.from_dict({"data": {"seq_len": 256}, "train": {"batch_size": 4}})
    MemoryEstimate(config, demo, 10_400_000, half=precision == "bf16").require(1 << 29)


def test_out_of_memory_states_the_estimate_and_options():
    config = CONFIGS["plain"]
    error = MemoryEstimate(config, RUN, 5000).out_of_memory("in step 7", "there is no checkpoint yet")
    assert "out of memory in step 7, with 4 rows of 64 tokens at a time; estimated were" in error.message
    for name in ("weights 19.53 KiB", "gradients", "optimizer", "copy", "rows", "activations", "logits"):
        assert name in error.message
    memory_options = ("train.batch_size", "data.seq_len", "activation_checkpointing=true", "train.precision=bf16")
    assert all(option in error.hint for option in (*memory_options, "async_save=false"))
    tight = replace(RUN.train, batch_size=1, activation_checkpointing=True, async_save=False)
    hint = MemoryEstimate(config, replace(RUN, train=tight), 5000, half=True).out_of_memory("", "").hint
    assert hint.endswith("to use less memory: a lower data.seq_len")


def refused(kind):
    if kind == "python":
        raise MemoryError
    if kind == "numpy":
        np.empty(1 << 60, np.int8)
    if kind == "gpu":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    torch.empty(1 << 60)


@pytest.mark.parametrize("kind", ["python", "numpy", "torch", "gpu"])
def test_out_of_memory_errors_are_translated(kind):
    error = MemoryPlanError("as planned")
    with pytest.raises(MemoryPlanError, match="as planned"), translate_oom(lambda: error):
        refused(kind)


def test_other_errors_are_not_translated():
    with pytest.raises(RuntimeError, match="a shape"), translate_oom(lambda: MemoryPlanError("")):
        raise RuntimeError("a shape is wrong")


def test_copy_for_callbacks_is_counted_beyond_a_steps_memory():
    """Evaluations hold no activations of a step."""
    model, count = next(iter(CONFIGS.values())), 10_000_000
    for rows, more in ((1, True), (4_000, False)):
        run = replace(RUN, train=replace(RUN.train, batch_size=rows))
        seen = replace(run, callbacks=CallbacksConfig(prompts=("a",)))
        parts, plain = (MemoryEstimate(model, each, count).parts(rows) for each in (seen, run))
        step = plain["activations"] + plain["logits"]
        assert plain["callbacks"] == 0 and parts["callbacks"] == max(0, 4 * count - step)
        assert (parts["callbacks"] > 0) is more
        assert {**parts, "callbacks": 0} == plain

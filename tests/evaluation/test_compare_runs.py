"""Comparison of runs: differences, summaries, curves, warnings."""

import json
import tomllib

import pytest

from kvad.cli.main import main
from kvad.errors import DataError
from kvad.evaluation import compare_runs
from kvad.evaluation.compare_runs import (
    comparison_warnings,
    loss_panels,
    plot_run,
    read_run,
    read_runs,
    run_differences,
)
from kvad.text.tokenizer import train_tokenizer
from kvad.train.config.run import RunConfig
from kvad.train.config.toml import format_run_file


def write_run(folder, *, lr=0.1, steps=20, kind="next-token", vocab="byte", end=True, model=None, saved=True):
    """Write the files of a run that comparing reads."""
    lines = [{"kind": "run", "parameters": 7, "precision": "fp32", "device": "cpu", "threads": 1}]
    for step in range(2, steps + 1, 2):
        numbers = {"loss": 4 / step, "lr": lr, "grad_norm": 1.0, "tokens": 10 * step, "elapsed": step / 2}
        lines.append({"kind": "step", "step": step, **numbers, "mfu": 0.25, "memory_peak": 1 << 20})
    lines += [{"kind": "eval", "step": step, "val_loss": abs(step - 9) + 1.0} for step in (5, 10, 20) if step <= steps]
    if end:
        lines.append({"kind": "end", "reason": "done"})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = RunConfig.from_dict({"optim": {"lr": lr}, "objective": {"kind": kind}, "model": model or {}})
    (folder / "run.toml").write_text(format_run_file(run))
    if not saved:
        return folder
    state = {"run": run.to_dict(), "corpus": ["x"]}
    saved = folder / "checkpoints" / f"step-{steps:08d}"
    (saved / "training").mkdir(parents=True)
    (saved / "training" / "state.json").write_text(json.dumps({**state, "data_fingerprint": "d"}))
    train_tokenizer(vocab, ["ada bob"]).save(saved)
    return folder


def test_differences_and_summaries(tmp_path):
    paths = [write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", lr=0.2, steps=10, end=False)]
    runs = read_runs(paths)
    assert [run.name for run in runs] == ["a/run", "b/run"]
    assert run_differences(runs) == {"optim.lr": [0.1, 0.2]} and comparison_warnings(runs) == []
    first, second = (run.summary(0.0) for run in runs)
    assert (first.steps, first.tokens, first.seconds, first.tokens_per_second) == (20, 200, 10.0, 20.0)
    assert (first.loss, first.validation, first.best, first.best_step) == (0.2, 12.0, 2.0, 10)
    assert first.finished and not second.finished and second.validation == second.best == 2.0


def test_smoothing_is_unbiased_at_the_start():
    assert compare_runs.smooth_curve([3.0, 3.0, 3.0], 0.9) == pytest.approx([3, 3, 3])
    assert compare_runs.smooth_curve([1.0, 2.0], 0.5) == pytest.approx([1.0, (0.5 * 1 * 0.5 + 0.5 * 2) / 0.75])
    assert compare_runs.smooth_curve([1.0, 2.0], 0.0) == [1.0, 2.0]


@pytest.mark.parametrize(("x", "first"), [("steps", 5.0), ("tokens", 50.0), ("seconds", 2.5)])
def test_evaluations_are_placed_between_logged_steps(tmp_path, x, first):
    loss, rate, norm = loss_panels([read_run(write_run(tmp_path / "run"))], x)
    held = next(one for one in loss.series if one.name == "validation")
    assert held.x[0] == pytest.approx(first) and list(held.y) == [5.0, 2.0, 12.0]
    assert len(rate.series[0].x) == len(norm.series[0].y) == 10


def test_warnings_for_incomparable_runs(tmp_path):
    one = write_run(tmp_path / "one")
    runs = read_runs([one, write_run(tmp_path / "two", vocab="char"), write_run(tmp_path / "three", kind="masked-lm")])
    warnings = comparison_warnings(runs)
    assert len(warnings) == 2 and "tokenizers differ" in warnings[0] and "NOT comparable" in warnings[0]
    assert "objectives differ" in warnings[1]
    bare = write_run(tmp_path / "bare")
    (bare / "checkpoints" / "step-00000020" / "training" / "state.json").unlink()
    (bare / "run.toml").unlink()
    assert "no checkpoint of bare yet" in comparison_warnings(read_runs([one, bare]))[0]
    assert run_differences(read_runs([one, bare])) == {}, "nothing is known of it"
    (bare / "run.toml").write_text('[optim]\nlr = 0.5\n[objective]\nkind = "next-token"\n[train]\nseed = 0\n')
    assert run_differences(read_runs([one, bare])) == {"optim.lr": [0.1, 0.5]}


ROTARY_ATTENTION = {"num_heads": 2, "position": {"kind": "rope"}}
ROTARY_LAYER = {"attention": ROTARY_ATTENTION, "mlp": {"kind": "plain", "intermediate_size": 64}}
ROTARY = {"hidden_size": 32, "decoder": {"num_layers": 2, "layer_types": {"L": ROTARY_LAYER}}}
LEARNED = {
    "embedding.position": {"kind": "learned", "num_positions": 256},
    "decoder.layer_types.L.attention.position": None,
}


def test_fields_of_only_one_model_differ(tmp_path):
    one = write_run(tmp_path / "one", model=ROTARY)
    other = write_run(tmp_path / "other", model={**ROTARY, "set": LEARNED})
    found = run_differences(read_runs([one, other]))
    assert found["model.decoder.layer_types.L.attention.position.kind"] == ["rope", None]
    assert found["model.embedding.position.kind"] == [None, "learned"]
    assert all(
        key.startswith(("model.decoder.layer_types.L.attention.position.", "model.embedding.position."))
        for key in found
    )


@pytest.mark.parametrize("saved", [True, False])
def test_equal_models_written_differently_do_not_differ(tmp_path, saved):
    one = write_run(tmp_path / "one", model={**ROTARY, "set": LEARNED})
    again = RunConfig.from_dict(tomllib.loads((one / "run.toml").read_text()))  # with "null", which state.json has not
    again_run = write_run(tmp_path / "again", model=again.model, saved=saved)
    rewritten = {
        **ROTARY,
        "set": {**LEARNED, "decoder.layer_pattern": "LL", "decoder.layer_types.L.attention.num_kv_heads": 2},
    }
    assert run_differences(read_runs([one, again_run, write_run(tmp_path / "rewritten", model=rewritten)])) == {}


def test_presets_differ_by_their_fields(tmp_path):
    tiny, small = (write_run(tmp_path / name, model={"preset": name}) for name in ("tiny", "small"))
    found = run_differences(read_runs([tiny, small]))
    assert (found["model.preset"], found["model.hidden_size"]) == (["tiny", "small"], [128, 256])
    begun = write_run(tmp_path / "begun", model={"init": "runs/x"})
    rotary = write_run(
        tmp_path / "rotary", model={"width": 32, "set": {"decoder.layer_types.L.attention.window": None}}
    )
    found = run_differences(read_runs([begun, rotary]))  # of a checkpoint: what was written
    assert found["model.init"] == ["runs/x", None]
    assert found["model.set.decoder.layer_types.L.attention.window"] == [None, "null"]


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(DataError, match="is not a folder"):
        read_run(tmp_path / "none")
    with pytest.raises(DataError, match=r"is not a run: it has no metrics\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "run"}\n')
    with pytest.raises(DataError, match="has logged no step yet"):
        read_run(tmp_path)
    one = write_run(tmp_path / "one")
    with pytest.raises(DataError, match="is named twice"):
        read_runs([one, tmp_path / "." / "one"])


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "one")
    write_run(tmp_path / "two", lr=0.2)
    assert main(["compare", "one", "two", "--x", "tokens"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["one", "two"] and out[1].split() == ["optim.lr", "0.1", "0.2"]
    (best,) = (line for line in out if line.startswith("best validation"))
    assert best.split()[2:] == ["2.0000", "(step", "10)"] * 2
    assert out[-2:] == ["compare.png", "compare.svg"] and (tmp_path / "compare.png").read_bytes()[:4] == b"\x89PNG"
    svg = (tmp_path / "compare.svg").read_text()
    assert all(word in svg for word in ("one", "two", "tokens learned", "learning rate", "gradient norm"))
    assert main(["compare", "one", "two", "--json", "-o", "x.svg"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [run["best_step"] for run in result["runs"]] == [10, 10] and result["figures"] == ["x.svg"]
    assert result["differences"] == {"optim.lr": [0.1, 0.2]} and result["cautions"] == []
    assert main(["compare", "one"]) == 2 and "compare needs at least two runs" in capsys.readouterr().err
    assert main(["compare", "one", "three"]) == 2 and "three is not a folder" in capsys.readouterr().err


def test_curves_of_one_run(tmp_path):
    run = write_run(tmp_path / "run")
    assert [path.name for path in plot_run(run)] == ["loss.png", "loss.svg", "curves.png", "curves.svg"]
    svg = (run / "curves.svg").read_text()
    assert all(word in svg for word in ("training, smoothed", "validation", "learning rate", "gradient norm"))

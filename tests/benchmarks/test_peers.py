"""The comparison with other engines (benchmarks/peers): costs, turns, protocol, tables. No other engine is needed."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import convert, driver, report
from benchmarks.peers.driver import Driver, Settings, WorkerError, WorkerProcess, format_of
from benchmarks.peers.progress import Progress, expected_seconds
from benchmarks.peers.results import EarlierLines, Measurement, agreement_among, code_commit, result_line
from benchmarks.peers.scenarios import DEFAULT, QUICK, SCENARIOS, cells, cost_of, needs_of, select, shape_fits
from benchmarks.peers.shapes import SHAPES

FAKE = """
import sys
from benchmarks.peers.engines import Outcome, Unsupported, serve

class Fake:
    def load(self, path, precision, threads, needs):
        self.path, self.runs = path, 0
        if precision == "int8":
            raise Unsupported("no int8 here")
    def versions(self):
        return {"fake": "1"}
    def run(self, scenario, prompts):
        print("noise on stdout")
        self.runs += 1
        if scenario.name == "prefill-512" and self.path.endswith("broken"):
            raise ValueError("broken on purpose")
        if scenario.kind == "read":
            return Outcome(0.5, 10_000_000_000, [])
        if scenario.kind == "multiply":
            return Outcome(0.5, 100_000_000_000, [])
        if scenario.name == "rows-8":
            sys.exit(3)
        assert scenario.name != "mixed-32" or len(prompts) == 32
        return Outcome(0.5 * self.runs, scenario.rows * scenario.new, [[7] * scenario.new] * scenario.rows)
    def check(self, prompts, outputs):
        lengths = {len(row) for output in outputs for row in output}
        assert all(len(output) == len(prompts) for output in outputs) and len(lengths) == 1
        return [{"agree": number, "count": len(prompts), "gap": None} for number, _ in enumerate(outputs)]

serve(Fake())
"""


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Settings whose engines are all the fake worker, and whose checkpoints need no conversion."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)

    def start(self, engine):
        return WorkerProcess([sys.executable, str(script)], self.settings.environment(), driver.subprocess.DEVNULL)

    monkeypatch.setattr(Driver, "_start", start)
    monkeypatch.setattr(driver, "PAUSE", 0)
    monkeypatch.setattr(convert, "ensure", lambda name, *_: tmp_path / ("broken" if "gguf" in name else name))
    return Settings(
        selections=(select("12m", ("decode-128",), ("bfloat16",)),), engines=("kvad", "llama.cpp"), repeats=3,
        max_seconds=600, threads=1, cache=tmp_path, peers_python=sys.executable, kvad_python=sys.executable,
        check=False,
    )  # fmt: skip


def line(engine, median, scenario="decode-128", precision="bfloat16", shape="135m", **more):
    unit = SCENARIOS[scenario].unit
    return {
        "bench": "peers", "shape": shape, "scenario": scenario, "engine": engine, "precision": precision, "unit": unit,
        "median": median, "min": 0.9 * median, "max": 1.2 * median, "values": [median] * 5, "roofline": 200.0,
        "of_roofline": median / 200, "read_gb_per_second": 30.0, "gflop_per_second": 390.0, "peak_rss": 1,
        "others_cpu": 0.02, "versions": {engine: "1"}, "machine": "a machine",
        "commit": "abc", "date": "2026-01-01T00:00Z", "agree": 64, "count": 65, "gap": 0.01, **more,
    }  # fmt: skip


# ---------------------------------------------------------------- costs


def test_bytes_of_a_decoding_step_are_those_of_the_weights_and_of_one_row_s_cache():
    shape, scenario = SHAPES["135m"], SCENARIOS["decode-128"]
    weights = 30 * (576 * 576 * 2 + 576 * 192 * 2 + 3 * 576 * 1536) + 576 * 49152
    assert shape.token_bytes("bfloat16") == 2 * weights
    assert shape.token_bytes("int8") == pytest.approx(weights * 34 / 32)
    assert shape.cache_bytes("bfloat16") == 2 * 2 * 30 * 3 * 64
    assert cost_of(shape, scenario, "bfloat16").bytes == 64 * (2 * weights + (128 + 32) * 2 * 2 * 30 * 3 * 64)


def test_rows_share_the_weights_and_not_the_cache():
    shape = SHAPES["135m"]
    one = cost_of(shape, replace(SCENARIOS["rows-8"], lengths=(136,)), "bfloat16")
    eight = cost_of(shape, replace(SCENARIOS["rows-8"], lengths=(136,) * 8), "bfloat16")
    weights = 32 * shape.token_bytes("bfloat16")
    assert eight.bytes - weights == pytest.approx(8 * (one.bytes - weights))
    assert eight.flops == pytest.approx(8 * one.flops)


def test_a_step_reads_the_experts_that_its_tokens_choose():
    shape = SHAPES["moe"]
    expert, rest = 3 * 1024 * 512, 1024 * 64 * (2 * 16 + 2 * 4) + 1024 * 64
    assert shape.token_bytes("bfloat16") == pytest.approx(2 * (12 * (rest + 8 * expert) + 1024 * 32000))
    assert shape.read_weights(8) == pytest.approx(rest + 64 * (1 - 0.875**8) * expert)
    assert cost_of(shape, SCENARIOS["load"], "bfloat16").bytes == 2 * (12 * (rest + 64 * expert) + 1024 * 32000)
    assert shape.token_flops(0) == 2 * 12 * (rest + 8 * expert)


def test_a_cached_prefix_is_read_and_not_computed():
    shape = SHAPES["135m"]
    hit, miss = (cost_of(shape, SCENARIOS[name], "bfloat16") for name in ("prefix-hit-2048", "prefill-2048"))
    assert hit.flops < miss.flops / 10
    assert hit.bytes - miss.bytes == 1920 * shape.cache_bytes("bfloat16")


def test_the_last_prompt_of_mixed_rows_is_computed_before_its_row_decodes():
    shape, scenario = SHAPES["135m"], replace(SCENARIOS["mixed-8"], lengths=(64, 16, 48))
    cost = cost_of(shape, scenario, "bfloat16")
    prompts = [
        cost_of(shape, replace(SCENARIOS["prefill-512"], lengths=(n,)), "bfloat16").flops for n in scenario.lengths
    ]
    alone = cost_of(shape, replace(SCENARIOS["decode-128"], lengths=(16,), new=31), "bfloat16").bytes
    alone += 31 * shape.cache_bytes("bfloat16") / 2  # of the mean context
    assert (cost.prompt_flops, cost.last_row_bytes) == pytest.approx((sum(prompts), alone))
    read, products = cost.bytes, cost.flops  # per second: reading and computing everything takes a second each
    assert cost.seconds(read, products) == pytest.approx(sum(prompts) / products + alone / read)
    assert cost.seconds(read, products) > 1
    assert cost.seconds(read / 100, products) == pytest.approx(100)
    assert cost.seconds(read, products / 100) == pytest.approx(100)
    assert cost_of(shape, SCENARIOS["rows-8"], "bfloat16").prompt_flops == 0


def test_an_8_bit_cache_halves_what_a_long_context_costs():
    costs = [cost_of(SHAPES["135m"], SCENARIOS["decode-16k"], name).bytes for name in ("bfloat16", "int8-cache")]
    assert costs[1] < 0.75 * costs[0]


def test_prompts_are_equal_in_every_run_and_valid_in_every_shape():
    for shape in SHAPES.values():
        for scenario in SCENARIOS.values():
            prompts = scenario.prompts(shape)
            assert prompts == scenario.prompts(shape)
            assert [len(prompt) for prompt in prompts] == list(scenario.lengths)
            assert all(5 <= token < shape.vocab - 1 for prompt in prompts for token in prompt)


def test_default_selections_name_scenarios_that_their_shape_has():
    assert all(shape_fits(SHAPES[shape], SCENARIOS[name]) for shape, name, _ in cells((*DEFAULT, *QUICK)))
    assert len(set(cells(DEFAULT))) == len(cells(DEFAULT))
    assert select("marian", SCENARIOS).precisions == ("float32", "int8")
    assert [each.kind for each in select("marian", SCENARIOS).scenarios] == ["translate"] * 2
    needs = needs_of(select("135m", ("rows-32", "decode-2k")).scenarios)
    assert needs["max_len"] >= 2048 + 64 and needs["rows"] == 32 and needs["tokens"] > 32 * (136 + 32)


def test_every_bar_is_measured_by_the_default_selections():
    engines = {
        (*cell, engine)
        for each in DEFAULT
        for cell in cells([each])
        for engine in each.engines(cell[2], command.ENGINES)
        if format_of(engine, cell[2], each.shape)
    }
    for bar in report.BARS:
        assert (bar.shape, bar.scenario, bar.precision, "kvad") in engines, bar
        if bar.peer not in ("best", "roofline", "rss"):
            assert (bar.shape, bar.scenario, bar.peer_precision or bar.precision, bar.peer) in engines, bar


# ---------------------------------------------------------------- turns


def test_engines_run_by_turns_and_every_value_is_kept(settings):
    lines = list(Driver(settings).run())
    assert [(each["engine"], len(each["values"])) for each in lines] == [("kvad", 3), ("llama.cpp", 3)]
    # Runs 1, 2, 4 and 6 are not timed; run n of the fake worker takes n / 2 seconds.
    assert (
        lines[0]["values"]
        == lines[1]["values"]
        == [pytest.approx(64 / seconds, rel=1e-4) for seconds in (1.5, 2.5, 3.5)]
    )
    assert (lines[0]["median"], lines[0]["max"]) == (25.6, pytest.approx(42.667))
    assert lines[0]["read_gb_per_second"] == 20 and lines[0]["gflop_per_second"] == 200
    assert lines[0]["versions"] == {"fake": "1"}


@pytest.mark.parametrize("max_bytes", [1, 1 << 40])
def test_large_models_are_loaded_again_for_each_turn_and_timed_twice(settings, monkeypatch, max_bytes):
    started = []
    start = Driver._start
    monkeypatch.setattr(driver, "MAX_RESIDENT_BYTES", max_bytes)
    monkeypatch.setattr(Driver, "_start", lambda self, engine: started.append(engine) or start(self, engine))
    lines = list(Driver(replace(settings, repeats=4)).run())
    assert [len(each["values"]) for each in lines] == [4, 4]
    engines = [name for name in started if name != "limits"]
    assert len(engines) == (
        2 if max_bytes > 1 else 5
    )  # untimed: both; turn 1: both again; turn 2: the other, the first


def test_an_engine_that_fails_or_refuses_is_named_and_skipped(settings, capsys):
    scenarios = ("prefill-512", "rows-8", "decode-128")
    lines = list(Driver(replace(settings, selections=(select("12m", scenarios, ("bfloat16", "int8")),))).run())
    refused = [each for each in lines if each["bench"] == "peers-refused"]
    lines = [each for each in lines if each["bench"] == "peers"]
    assert {each["reason"] for each in refused} == {"no int8 here"} and len(refused) == 6
    errors = capsys.readouterr().err
    assert "skipped: 12m prefill-512 llama.cpp bfloat16: ValueError: broken on purpose" in errors
    assert "skipped: 12m decode-128 kvad int8: no int8 here" in errors
    assert "skipped: 12m rows-8 kvad bfloat16: the process ended with status 3" in errors
    assert {(each["scenario"], each["engine"]) for each in lines} == {
        ("prefill-512", "kvad"), ("decode-128", "kvad"), ("decode-128", "llama.cpp"),
    }  # fmt: skip


def test_a_conversion_that_fails_is_named_and_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError, match="12m cannot be converted to kvad-int8: "):
        convert.ensure("kvad-int8", SHAPES["12m"], tmp_path, sys.executable, dict(driver.os.environ))
    assert not list(tmp_path.rglob("kvad-int8"))


def test_a_worker_that_ended_is_reported(settings, tmp_path):
    worker = Driver(settings)._start("kvad")
    worker.ask(op="load", path="x", precision="bfloat16", threads=1, needs={})
    with pytest.raises(WorkerError, match="ended with status 3"):
        worker.ask(op="run", scenario=SCENARIOS["rows-8"].as_json(), prompts=[[5]] * 8)
    worker.close()


def test_formats_of_engines():
    assert format_of("llama.cpp", "int8", SHAPES["135m"]) == "gguf-int8"
    assert format_of("llama.cpp", "int8", SHAPES["marian"]) is None
    assert format_of("ctranslate2", "bfloat16", SHAPES["135m"]) is None
    assert all(name in convert.FORMATS for name in driver.FORMAT_OF.values())


@pytest.mark.parametrize(("scenario", "rows"), [("decode-128", 1), ("mixed-32", 4)])
def test_tokens_of_some_rows_are_compared_with_the_reference(settings, scenario, rows):
    selection = select("12m", (scenario,), ("bfloat16",))
    lines = list(Driver(replace(settings, selections=(selection,), check=True, repeats=1)).run())
    assert [(each["agree"], each["count"]) for each in lines] == [(0, rows), (1, rows)]


def test_rounds_end_at_the_limit_and_the_number_of_runs_is_reported(settings, capsys):
    lines = list(Driver(replace(settings, max_seconds=0, repeats=5)).run())
    assert [(len(each["values"]), each["ended_after"]) for each in lines] == [(3, 0), (3, 0)]
    assert "12m decode-128: 3 timed runs only, because of --max-seconds" in capsys.readouterr().err


def test_the_time_limit_begins_after_untimed_runs_and_the_comparison(settings, monkeypatch):
    clock = iter(range(0, 10**6, 100))
    monkeypatch.setattr(driver.time, "monotonic", clock.__next__)

    def check(*_):
        for _ in range(50):
            next(clock)
        return {}

    monkeypatch.setattr(Driver, "_check", check)
    lines = list(Driver(replace(settings, check=True, max_seconds=1500, repeats=5)).run())
    assert [len(each["values"]) for each in lines] == [5, 5]


def test_a_turn_is_compared_with_the_limits_around_it_and_products_of_the_run(settings, monkeypatch):
    values = iter([(30e9, 400e9), (40e9, 300e9), (20e9, 350e9), (10e9, 100e9), (15e9, 100e9), (50e9, 500e9)])
    monkeypatch.setattr(Driver, "_limits", lambda *_: next(values))
    selection = select("12m", ("decode-128", "decode-2k"), ("bfloat16",))
    lines = list(Driver(replace(settings, selections=(selection,), engines=("kvad",), repeats=2)).run())
    found = [[each[name] for name in ("read_gb_per_second", "gflop_per_second")] for each in lines]
    assert found == [[40, 400], [(15 + 50) / 2, (400 + 500) / 2]]


def test_scenarios_that_a_file_completes_at_this_commit_are_skipped(settings, monkeypatch, capsys):
    monkeypatch.setattr(driver, "code_commit", lambda: "abc")
    settings = replace(settings, selections=(select("12m", ("decode-128", "load"), ("bfloat16", "int8")),))
    first = list(Driver(settings).run())
    again = replace(settings, earlier=[each for each in first if each["scenario"] == "decode-128"])
    assert {each["scenario"] for each in Driver(again).run()} == {"load"}
    assert "skipped: 1 scenarios that were measured at commit abc already" in capsys.readouterr().err
    assert not list(Driver(replace(settings, earlier=first)).run())
    for changed in ({"repeats": 4}, {"threads": 2}, {"check": True}, {"earlier": first[1:]}):
        assert len(Driver(replace(settings, **{"earlier": first, **changed})).tasks) == (
            1 if "earlier" in changed else 2
        )
    monkeypatch.setattr(driver, "code_commit", lambda: "abd")
    assert len(Driver(replace(settings, earlier=first)).tasks) == 2


def test_a_time_limit_that_ended_the_runs_completes_a_scenario_and_uncommitted_changes_do_not():
    measured = line("kvad", 1.0, ended_after=60.0)
    key = "135m", "decode-128", "kvad", "bfloat16"

    def complete(commit="abc", repeats=9, max_seconds=60.0):
        header = {"machine": "a machine", "commit": commit}
        return EarlierLines(header, repeats, max_seconds, [{**measured, "commit": commit}]).complete([key])

    assert complete()
    assert not complete(max_seconds=61.0)
    assert complete(repeats=5, max_seconds=61.0)
    assert not complete("abc-dirty") and not complete("")


def test_commit_is_that_of_the_measured_files(monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        output = "abc" if "log" in command else " M kvad/llm.py"
        return driver.subprocess.CompletedProcess(command, 0, output, "")

    assert len(code_commit().removesuffix("-dirty")) in (0, 12)
    monkeypatch.setattr("benchmarks.peers.results.subprocess.run", run)
    assert code_commit() == "abc-dirty"
    assert all(each[each.index("--") + 1] == "kvad" and "dev" not in each for each in commands)


def test_progress_estimates_the_rest_by_the_pace_so_far():
    times, output = iter([0, 0, 60, 60, 65, 300, 300]), []
    progress = Progress([30, 90], times.__next__, output.append)
    progress.show("first: untimed runs", 0.0, always=True)
    progress.show("first: turn 1 of 1", 0.5)
    progress.show("first: too soon", 0.5)
    progress.finish()
    progress.show("second: turn 1 of 1", 0.5)
    assert output == [
        "[1/2] first: untimed runs; 0 min, about 2 min left",
        "[1/2] first: turn 1 of 1; 1 min, about 7 min left",
        "[2/2] second: turn 1 of 1; 5 min, about 3 min left",
    ]
    short, long = (
        expected_seconds(SHAPES["135m"], SCENARIOS[name], [("kvad", "bfloat16")], 5) for name in ("rows-8", "mixed-32")
    )
    assert long > 2 * short


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_processor_time_of_others_is_measured(settings, monkeypatch, is_disturbed):
    machine = iter(range(100))
    monkeypatch.setattr(driver, "machine_cpu_seconds", lambda: next(machine) if is_disturbed else 0.0)
    monkeypatch.setattr(WorkerProcess, "cpu_seconds", lambda self: 0.0)
    monkeypatch.setattr(driver.time, "perf_counter", iter(range(0, 1000, 2)).__next__)
    monkeypatch.setattr(driver.os, "cpu_count", lambda: 2)
    lines = list(Driver(settings).run())
    assert lines[0]["others_cpu"] == (0.25 if is_disturbed else 0)  # one second of two on two cores


# ---------------------------------------------------------------- lines and tables


def test_a_result_line_has_the_median_the_extremes_and_the_share_of_the_roofline():
    shape, scenario = SHAPES["135m"], SCENARIOS["decode-128"]
    measured = Measurement("kvad", "bfloat16", values=[90.0, 110.0, 100.0], rounds=[0, 1, 2])
    limits = [(20e9, 390e9), (30e9, 390e9), (80e9, 390e9), (60e9, 390e9)]
    result = result_line(shape, scenario, measured, limits)
    assert (result["median"], result["min"], result["max"]) == (100, 90, 110)
    least = cost_of(shape, scenario, "bfloat16").bytes / 80e9  # of two of three turns
    assert result["roofline"] == pytest.approx(64 / least, rel=1e-4)
    assert result["of_roofline"] == pytest.approx(110 * least / 64, abs=1e-3)
    assert result["roofline_shares"] == pytest.approx([240 * least / 64, 110 * least / 64, 100 * least / 64], abs=1e-3)
    seconds = result_line(
        shape, SCENARIOS["load"], Measurement("kvad", "bfloat16", values=[2.0], rounds=[0]), [(30e9, 390e9)] * 2
    )
    assert seconds["of_roofline"] == pytest.approx(shape.token_bytes("bfloat16") / 30e9 / 2, abs=1e-3)


def test_agreement_counts_tokens_up_to_the_first_difference():
    rows = [[1, 2, 3], [4, 5, 6]]
    reference = Measurement("transformers", "float32", output=rows)
    other = Measurement("kvad", "float32", output=[[1, 9, 3], [4, 5, 6]])
    found = agreement_among([other, reference])
    assert found["kvad float32"] == {"agree": 4, "count": 6, "gap": None}
    assert found["transformers float32"]["agree"] == 6
    assert agreement_among([other]) == {}


def test_table_has_ratios_of_which_more_is_always_faster():
    lines = [line("kvad", 120.0), line("llama.cpp", 100.0), line("kvad", 2.0, "load"), line("openvino", 3.0, "load")]
    text = report.table(lines)
    assert "1.20x" in text and "2%" in text and "1.50x" in text and "64/65, gap 0.010" in text
    assert report.table([*lines, line("llama.cpp", 60.0)]).count("2.00x") == 1  # a later line replaces an earlier one


def test_a_ratio_is_the_median_of_those_of_the_rounds():
    own, other = line("kvad", 30.0, values=[20.0, 30.0, 90.0]), line("llama.cpp", 60.0, values=[10.0, 60.0, 60.0])
    assert report.ratio(own, other) == 1.5
    assert report.ratio(own, {**other, "date": "2026-01-02T00:00Z"}) == 0.5  # another run: of the medians
    assert report.ratio(own, {**other, "values": [10.0, 60.0]}) == 0.5
    own, other = ({**each, "unit": "seconds"} for each in (own, other))
    assert report.ratio(own, other) == pytest.approx(1 / 1.5)


@pytest.mark.parametrize(("kvad", "reached"), [(120.0, "yes"), (119.0, "no")])
def test_bars(kvad, reached):
    rows = report.bars_rows([line("kvad", kvad), line("llama.cpp", 100.0, values=[100.0] * 2)])
    measured = [row for row in rows[1:] if row[6] != "not measured"]
    assert measured == [("135m", "decode-128", "bfloat16", "llama.cpp", "1.20", f"{kvad / 100:.2f}", reached, "2")]
    assert len(rows) == len(report.BARS) + 1


def test_bars_that_were_not_measured_are_counted():
    lines = [line("kvad", 119.0), line("llama.cpp", 100.0), line("kvad", 300.0, "decode-16k")]
    total = len(report.BARS)
    summary = f"Of {total} bars 0 are reached, 1 are not; 1 limit measured too low, {total - 2} not measured."
    assert report.bars_table(lines).endswith(summary) and report.section(lines, "x").count(summary) == 1
    assert report.bars_table(lines).count("\n") < 6
    assert "| 1.1b | mixed-8 | bfloat16 | best | 1.10 | - | not measured | - |" in report.section(lines, "x")


def test_rows_state_their_turns_commits_and_what_makes_them_uncertain():
    few = {"values": [100.0] * 2, "commit": "abcdef0123-dirty", "others_cpu": 0.06}
    lines = [line("kvad", 300.0, agree=0), line("llama.cpp", 100.0, **few)]
    del lines[0]["agree"]
    row = next(each for each in report.engines_table(lines).splitlines() if each.startswith("| 135m | decode-128 |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[4:6] == ["300 ± 60", "100"] and cells[11:13] == ["2 to 5", "abc, abcdef0-dirty"]
    assert cells[13] == (
        "uncommitted changes, engines of different runs, tokens not compared, limit measured too low, "
        "other programs ran (llama.cpp)"
    )
    assert "| 1.1b | mixed-8 | bfloat16 | tokens/s | - | - | - | - | - | - | - | - | - | not measured |" in (
        report.engines_table(lines)
    )
    same = report.engines_table([line("kvad", 100.0), line("openvino", 100.0)])
    assert "| 1.00 | 0.50 | 5 | abc |  |" in same


def test_bars_against_the_best_engine_the_roofline_another_precision_and_the_memory():
    lines = [
        line("kvad", 300.0, "prefill-512"), line("llama.cpp", 200.0, "prefill-512"),
        line("openvino", 400.0, "prefill-512"),
        line("kvad", 50.0, "decode-16k"), line("kvad", 70.0, "decode-16k", "int8-cache"),
        line("kvad", 1.0, "load", shape="1.1b", peak_rss=5_000_000_000),
    ]  # fmt: skip
    found = {(row[1], row[3]): row[5] for row in report.bars_rows(lines) if row[5] != "-"}
    assert found["prefill-512", "best"] == "0.75"
    assert found["decode-16k", "roofline"] == "0.25"
    assert found["decode-16k", "kvad bfloat16"] == "1.40"
    assert found["load", "rss"] == "0.51"


def test_page_is_written_between_its_markers(tmp_path):
    page, results = tmp_path / "page.md", tmp_path / "x.jsonl"
    results.write_text("".join(json.dumps(each) + "\n" for each in (line("kvad", 1234.0), line("openvino", 1000.0))))
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    assert command.main(["docs", str(results), "--page", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n" + report.BEGIN) and text.endswith(report.END + "\nafter\n") and "old" not in text
    assert (
        "| 135m | decode-128 | bfloat16 | tokens/s | 1,234 ± 247 | - | 1,000 ± 200 | - | - | 1.23 | 6.17 | 5 | abc |"
        in text
    )
    assert "abc" in text and "a machine" in text and "64 of 65" in text
    assert command.main(["docs", str(results), "--page", str(page)]) == 0
    assert page.read_text() == text


@pytest.mark.parametrize(("page", "lines"), [("results", "peers"), ("results-xeon", "peers-xeon")])
def test_pages_have_the_tables_of_the_stored_lines(tmp_path, page, lines):
    stored = command.PAGE.with_name(f"decoding-speed-{page}.md")
    copy = tmp_path / "page.md"
    copy.write_text(stored.read_text())
    assert command.main(["docs", str(command.ROOT / f"dev/results/{lines}.jsonl"), "--page", str(copy)]) == 0
    assert copy.read_text() == stored.read_text(), "write it: python -m benchmarks.peers docs LINES --page PAGE"


def test_commands_report_what_is_missing(tmp_path, capsys):
    empty, page = tmp_path / "x.jsonl", tmp_path / "page.md"
    empty.write_text('{"bench": "cache"}\n')
    page.write_text("no markers")
    assert command.main(["table", str(empty)]) == 2
    assert "has no lines of this benchmark" in capsys.readouterr().err
    empty.write_text(json.dumps(line("kvad", 1.0)))
    assert command.main(["docs", str(empty), "--page", str(page)]) == 2
    assert report.BEGIN in capsys.readouterr().err
    assert command.main(["run", "--peers", str(tmp_path)]) == 2
    assert "Run: make peers" in capsys.readouterr().err
    assert command.main(["run", "--repeats", "0"]) == 2
    assert command.main(["run", "--peers", sys.prefix, "--shapes", "gpt2"]) == 2
    assert "Name scenarios" in capsys.readouterr().err
    assert command.main(["table", str(tmp_path / "none.jsonl")]) == 2


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as exit_status:
        command.main(["--help"])
    assert exit_status.value.code == 0
    assert "python -m benchmarks.peers run --shapes 135m" in capsys.readouterr().out


def test_options_select_shapes_and_scenarios():
    options = command.parser().parse_args(["run", "--shapes", "135m", "--scenarios", "decode-128", "load"])
    (selection,) = command.selections(options)
    assert selection.shape.name == "135m" and [each.name for each in selection.scenarios] == ["decode-128", "load"]
    options = command.parser().parse_args(["run", "--quick", "--precisions", "int8"])
    assert [each.precisions for each in command.selections(options)] == [("int8",)]
    assert cells(command.selections(command.parser().parse_args(["run"]))) == cells(DEFAULT)
    options = command.parser().parse_args(["run", "--shapes", "135m", "--precisions", "int8-cache"])
    assert cells(command.selections(options)) == [("135m", "decode-16k", "int8-cache")]


def test_readme_s_ratios_are_those_of_the_results():
    lines = report.latest(command.read_lines([command.ROOT / command.RESULTS]))

    def ratios(peer, unit):
        """Return the smallest and the largest ratio of kvad to another engine in bfloat16."""
        pairs = [
            (own, lines.get((shape, scenario, precision, peer)))
            for (shape, scenario, precision, engine), own in lines.items()
            if engine == "kvad" and precision == "bfloat16" and scenario != "prefix-hit-2048" and own["unit"] == unit
        ]
        values = [report.ratio(own, other) for own, other in pairs if other is not None]
        return min(values), max(values)

    text = (command.ROOT / "README.md").read_text()
    number = r"([\d.]+)(?: to ([\d.]+))? times as fast as"
    found = re.search(rf"{number} llama\.cpp and {number} OpenVINO, loading {number} llama\.cpp", text)
    assert found, "the README has no such sentence"
    measured = [ratios("llama.cpp", "tokens/s"), ratios("openvino", "tokens/s"), ratios("llama.cpp", "seconds")]
    for place, values in enumerate(measured):
        least, most = found[2 * place + 1], found[2 * place + 2] or found[2 * place + 1]
        assert (float(least), float(most)) == pytest.approx(values, rel=0.011)


def test_requirements_are_pinned():
    lines = (Path(command.__file__).parent / "requirements.txt").read_text().splitlines()
    assert lines and all("==" in each for each in lines)

"""``kvad demo`` (``make run``): train a small model on this machine, generate from it and verify its cache.

The parts are training, a streamed completion, ``verify``, ``bench cache`` and next steps, each called as a function.
``--out`` contains the model, ``demo.json`` and two figures.
"""

from __future__ import annotations

import json
import shlex
import signal
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import kvad.verify as verify  # kvad.verify is also a function
from kvad import benchmarks, checkpoint, datasets
from kvad.cli.commands.bench import bench_lines, write_results
from kvad.cli.commands.train import draw_loss_curve
from kvad.cli.fields import command, option
from kvad.cli.output import console, emit_json, exit_with, format_table, print_error, program_path
from kvad.cli.parameters import JsonOption, open_llm
from kvad.errors import UsageError, format_bytes
from kvad.train import loop, monitoring
from kvad.train.config import DataConfig, OptimConfig, RunConfig, TokenizerConfig, TrainConfig

if TYPE_CHECKING:
    from kvad.llm import LLM
    from kvad.train.monitoring import TrainingResult

RESULT = "demo.json"
MINUTES = 2.0
CONTEXT = 256  # tokens of a training row and the model's limit; longer rows learn less in two minutes
VOCAB_SIZE = 1024  # more text per parameter and more steps per minute than 4,096
PRESET = "demo"
BENCH_LENGTHS = (32, 64, 128, 240)
PROMPT = "    def __init__(self"  # not "def ": byte-level BPE joins a space with the word after it
TEMPERATURE = 0.7  # a model of two minutes writes no words at 1
NEXT_STEPS = (
    (f"{{kvad}} generate {{out}} 'class Node' --temperature {TEMPERATURE} --stats", "continue your own text"),
    (f"{{kvad}} chat {{out}} --temperature {TEMPERATURE}", "chat with it (/kv shows the cache)"),
    ("{kvad} serve {out}", "serve it: a web page and OpenAI's API"),
    ("{kvad} verify {out} --inject-fault mask", "inject a fault: verify names it"),
    ("{kvad} plan {out} --max-num-seqs 8", "estimate the memory"),
    ("{kvad} inspect {out} --attention 'def f(x):'", "show the attention of a head"),
    ("{kvad} train {texts} --minutes 1 --out runs/mine", "train on texts (here: Python's json)"),
)


class _DemoOptions(JsonOption):
    minutes: float = option("Minutes of training", MINUTES)
    out: Path = option("Folder of the run", Path("runs/demo"), short="-o")
    seed: int = option("Seed of weights, data order and sample", 0, short="-s")
    repeats: int = option("Runs of every timing", 2)


@command("demo", _DemoOptions)
def demo_command(options: _DemoOptions) -> None:
    """Train a small model, generate from its KV cache, verify the cache and measure its speedup.

    \b
    kvad demo
    kvad demo --minutes 0.5 --out runs/quick
    """
    out, seed = options.out, options.seed
    if (out / "checkpoints").exists() and not (out / RESULT).exists():
        hint = "choose another folder: --out runs/mine"
        raise UsageError(f"{out} contains a run that the demo did not create", hint)
    page = _Page(options.as_json)
    start = time.perf_counter()
    outcome = _train(page, options.minutes, out, seed)
    if outcome.reason == "interrupted":
        page.write(f"stopped; the model of step {outcome.step} is in {out}")
        exit_with(128 + (outcome.signal or signal.SIGINT))
    with open_llm(out, {}, max_num_seqs=4) as llm:
        completion = _generate(page, llm, seed)
        report = _verify(page, llm, out)
        page.title("how much faster is it with the cache?  (kvad bench cache)")
        bench = benchmarks.bench_cache(llm, BENCH_LENGTHS, options.repeats)
    page.write("\n".join(bench_lines(bench)))
    for path in write_results(bench, out):
        print_error(f"figure: {path}")
    speedup = dict(zip(map(str, bench.tokens), bench.speedup, strict=True))
    result = {
        "steps": outcome.step, "tokens": outcome.tokens, "train_seconds": outcome.elapsed,
        "loss": outcome.loss, "val_loss": outcome.val_loss, "completion": completion,
        "verdict": report.verdict(), "exact": not report.broken, "speedup": speedup, "flatness": bench.flatness,
        "engine_ms": bench.engine_ms, "model_ms": bench.model_ms, "seconds": time.perf_counter() - start,
    }  # fmt: skip
    (out / RESULT).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    page.title("next")
    paths = {
        "kvad": program_path(),
        "out": shlex.quote(str(out)),
        "texts": shlex.quote(str(Path(json.__file__).parent)),
    }
    for line in format_table([(step.format(**paths), text) for step, text in NEXT_STEPS]):
        page.write(f"  {line}")
    if options.as_json:
        emit_json(result)
    exit_with(1 if report.broken else 0)


@dataclass
class _Page:
    """Prints text to stdout, or to stderr if stdout is for JSON."""

    to_stderr: bool

    def write(self, text: str = "", *, end: str = "\n") -> None:
        click.echo(text + end, nl=False, err=self.to_stderr)

    def title(self, text: str) -> None:
        self.write(f"\n{click.style(f'— {text} —', bold=True)}")


def needs_training(out: Path) -> bool:
    """Return True if a folder has no model, or that of a demo whose training was stopped."""
    if not (out / "checkpoints").exists():
        return True
    try:
        return "steps" not in json.loads((out / RESULT).read_text("utf-8"))
    except (OSError, ValueError):
        return (out / RESULT).exists()  # else it is the run of another command


def train_demo(out: Path, minutes: float) -> None:
    """Train the demo's model in a folder, with progress on stderr; exit if a signal stops it."""
    outcome = _train(_Page(to_stderr=True), minutes, out, 0)
    if outcome.reason == "interrupted":
        print_error("training stopped, nothing is served; the next start trains again")
        exit_with(128 + (outcome.signal or signal.SIGINT))


def _train(page: _Page, minutes: float, out: Path, seed: int) -> TrainingResult:
    sources = datasets.stdlib_sources.find_sources()
    page.title("train")
    page.write(
        f"corpus: {sources.description} ({sources.root}): {len(sources.files)} files, {format_bytes(sources.num_bytes)}"
    )
    config = RunConfig(
        model={"preset": PRESET, "max_seq_len": CONTEXT},
        data=DataConfig(seq_len=CONTEXT, encoding_errors="replace"),
        tokenizer=TokenizerConfig(vocab_size=VOCAB_SIZE),
        optim=OptimConfig(lr=3e-3, min_lr=0.0),
        train=TrainConfig(minutes=minutes, batch_size=8, eval_interval=200, eval_tokens=16384, seed=seed),
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / RESULT).write_text("{}\n", encoding="utf-8")  # marks the folder as the demo's
    with closing(monitoring.make_progress(console())) as progress:
        outcome = loop.train_model(config, sources.files, out, overwrite=True, callbacks=[progress])
    if outcome.reason == "interrupted":  # perhaps before the first evaluation
        return outcome
    (out / RESULT).write_text(json.dumps({"steps": outcome.step}) + "\n", encoding="utf-8")
    page.write(
        f"{outcome.step} steps, {outcome.tokens:,} tokens in {outcome.elapsed:.0f} s: loss {outcome.loss:.3f}, "
        f"validation loss {outcome.val_loss:.3f}"
    )
    for path in draw_loss_curve(out):
        print_error(f"curve: {path}")
    return outcome


def _generate(page: _Page, llm: LLM, seed: int) -> dict[str, Any]:
    page.title(f"{PROMPT!r} continued, from the paged cache")
    page.write(PROMPT, end="")
    start, tokens, text = time.perf_counter(), 0, ""
    for chunk in llm.stream(PROMPT, max_tokens=160, temperature=TEMPERATURE, top_p=0.95, seed=seed, min_tokens=80):
        tokens += chunk.token_id is not None
        text += chunk.text
        page.write(chunk.text, end="")
    seconds = time.perf_counter() - start
    stats = llm.engine.kv_cache_manager.stats()
    page.write()
    page.write(
        f"({tokens} tokens, {tokens / seconds:.0f} tokens/s; {stats.evictable[0]} blocks stay in the prefix cache)"
    )
    return {"prompt": PROMPT, "text": text, "tokens": tokens, "seconds": seconds}


def _verify(page: _Page, llm: LLM, out: Path) -> verify.report.VerifyReport:
    page.title("does the cache change the output?  (kvad verify)")
    options = verify.ScenarioOptions()
    model, _ = checkpoint.loader.load_model(out)  # as stored: the engine has joined the products of llm.model
    report = verify.verify(model, verify.build_prompts(model.config, options, llm.tokenizer), options)
    for case in report.cases:
        page.write(
            f"{case.layout + ' ' + case.dtype:<22} max |dlogit| {case.max_dlogit:.1e}  "
            f"greedy {case.agree}/{case.compared}  {case.verdict}"
        )
    page.write(f"verdict: {report.verdict()}")
    return report

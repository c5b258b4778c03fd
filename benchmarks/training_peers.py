"""A training step of GPT-2's shape: kvad, a loop like nanoGPT's, and transformers.Trainer, in alternation.

    python benchmarks/training_peers.py --precision fp32    # GPT-2 124M, 4 rows of 512 tokens
    OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 nice python benchmarks/training_peers.py --clock cpu      # on a busy machine
    python benchmarks/training_peers.py --layers 4 --width 128 --heads 4 --vocab 66 --batch-size 12 \
        --seq-len 64 --steps 50

Each program is a process that runs its own loop and waits in it for its turn: ``kvad`` is ``Trainer.fit`` with a
document dataset; ``nanogpt`` is the loop that nanoGPT's README describes, written here in plain PyTorch;
``transformers`` is ``Trainer.train`` of ``GPT2LMHeadModel`` (``pip install transformers accelerate``). All have the
same weights, the same rows of random tokens, the same function (tanh GELU, learned positions, biases, a tied head),
scaled_dot_product_attention, fused AdamW with the same groups, a gradient clipped at 1.0, no dropout.

The output is one JSON line per precision: medians of a step in milliseconds, tokens per second, and kvad's speed
relative to the faster of the others. ``first`` and ``last`` are losses: the first verifies equal work (1e-4 in fp32,
before any update), the last, after all updates, equal optimizers. ``peak_mb`` is the peak memory of each process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvad.benchmarks.results import commit_id, machine_info
from kvad.checkpoint.handle import CheckpointSnapshot, TrainingState
from kvad.config.layers import (
    AttentionConfig,
    EmbeddingConfig,
    LayerConfig,
    LearnedPositionsConfig,
    NormConfig,
    PlainMLPConfig,
    StackConfig,
)
from kvad.config.model import ModelConfig
from kvad.model.transformer import Transformer
from kvad.train.config.run import RunConfig
from kvad.train.data.packed_dataset import PackedDataset
from kvad.train.data.packers import DocumentPacker, SplitRows
from kvad.train.data.token_store import TokenStore
from kvad.train.loop.async_checkpointer import AsyncCheckpointer
from kvad.train.loop.trainer import Trainer, TrainerState, apply_acceleration
from kvad.train.monitoring.callbacks import Callback, StartReport, StepReport
from kvad.train.objectives.cross_entropy import Autocast, CrossEntropyObjective
from kvad.train.optim.optimizer import OptimizersContainer

LR, BETAS, DECAY, CLIP = 6e-4, (0.9, 0.95), 0.1, 1.0
TOKENS = 1 << 18


class Turn:
    """Child's side of the alternation: reports the time of a step and waits for the next turn."""

    def __init__(self) -> None:
        self._out, sys.stdout = sys.stdout, sys.stderr

    def say(self, **values: object) -> None:
        print(json.dumps(values), file=self._out, flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def over(self, loss: float) -> None:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        self.say(wall=wall, cpu=cpu, loss=loss, peak=peak)


def shape(options: argparse.Namespace) -> ModelConfig:
    attention = AttentionConfig(options.heads, position=None, qkv_bias=True, out_bias=True)
    layer = LayerConfig(
        attention, PlainMLPConfig(4 * options.width, "gelu_tanh", bias=True), NormConfig("layer", 1e-5, bias=True)
    )
    embed = EmbeddingConfig(LearnedPositionsConfig(options.seq_len))
    return ModelConfig(
        options.width, options.vocab, options.seq_len, StackConfig(options.layers, {"L": layer}), embedding=embed
    )


def settings(options: argparse.Namespace) -> RunConfig:
    optim = {"lr": LR, "schedule": "constant", "warmup_steps": 0, "beta1": BETAS[0], "beta2": BETAS[1]}
    return RunConfig.from_dict(
        {
            "data": {"seq_len": options.seq_len, "order": "windows"},
            "optim": {**optim, "weight_decay": DECAY, "max_grad_norm": CLIP},
            "train": {
                "steps": 10**6,
                "batch_size": options.batch_size,
                "precision": options.precision,
                "eval_interval": 10**6,
            }
            | {"save_interval": 10**6, "compile": options.compile},
        }
    )


def write_store(folder: Path, vocab: int) -> None:
    """Write one long document of random tokens, as ``kvad data prepare`` would."""
    tokens = np.random.default_rng(0).integers(0, vocab, TOKENS)
    tokens.astype("<u2").tofile(folder / "tokens-00000.bin")
    np.array([0, TOKENS], "<u8").tofile(folder / "offsets.bin")


def open_store(folder: Path) -> TokenStore:
    return TokenStore(
        folder, {"fingerprint": "", "dtype": "uint16", "shards": [{"file": "tokens-00000.bin", "tokens": TOKENS}]}
    )


# ---------------------------------------------------------------- kvad


def run_kvad(options: argparse.Namespace, turn: Turn) -> None:
    config, model = settings(options), fresh(options)
    apply_acceleration(model, config.train)
    data = PackedDataset(DocumentPacker(open_store(options.store), config), config)
    objective = CrossEntropyObjective(model, Autocast(options.precision, "cpu"))

    class Turns(Callback):
        def on_start(self, _report: StartReport) -> None:
            turn.say()

        def on_step(self, report: StepReport) -> None:
            turn.over(report.loss)

    optimization = OptimizersContainer(model, config.optim, config.train)
    saver = AsyncCheckpointer(
        lambda: CheckpointSnapshot(0, {}, TrainingState({}, {}), None), lambda _: Path(), async_save=False
    )  # nothing, nowhere
    Trainer(model, objective, optimization, data, config.train, TrainerState(), saver, callbacks=[Turns()]).fit()


def fresh(options: argparse.Namespace) -> Transformer:
    torch.manual_seed(0)
    return Transformer(shape(options))


# ---------------------------------------------------------------- nanoGPT's loop


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(options.vocab, options.width)
        self.positions = nn.Embedding(options.seq_len, options.width)
        self.blocks = nn.ModuleList(Block(options.width, options.heads) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def run_nanogpt(options: argparse.Namespace, turn: Turn) -> None:
    model = GPT(options).train()
    model.load_state_dict(dict(zip(model.state_dict(), as_gpt(fresh(options)), strict=True)))
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
    run = torch.compile(model) if options.compile else model
    autocast = torch.autocast("cpu", torch.bfloat16) if options.precision == "bf16" else nullcontext()
    store = np.memmap(options.store / "tokens-00000.bin", "<u2", "r")
    turn.say()
    for starts in all_starts(options):
        rows = [torch.from_numpy(store[at : at + options.seq_len + 1].astype(np.int64)) for at in starts]
        inputs, targets = torch.stack([row[:-1] for row in rows]), torch.stack([row[1:] for row in rows])
        with autocast:
            loss = run(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turn.over(loss.item())


def as_gpt(model: Transformer) -> list[Tensor]:
    """Return kvad's weights in the order of ``GPT``'s."""
    state = model.state_dict()
    results = [state["embedding.tokens.weight"], state["embedding.positions.weight"]]
    for number in range(len(model.decoder.layers)):
        for name in ("norm1", "norm2", "attention.qkv", "attention.out", "mlp.up", "mlp.down"):
            for kind in ("weight", "bias"):
                names = [f"attention.{part}" for part in "qkv"] if name == "attention.qkv" else [name]
                results.append(torch.cat([state[f"decoder.layers.{number}.{each}.{kind}"] for each in names]))
    return [*results, state["decoder.norm.weight"], state["decoder.norm.bias"]]


def all_starts(options: argparse.Namespace) -> list[list[int]]:
    """Return the start positions of each step's rows, in kvad's order."""
    config, store = settings(options), open_store(options.store)
    training = DocumentPacker(store, config).training
    assert training.spans[0, 0] == 0, "the first tokens are for training"
    rows = SplitRows(training, options.seq_len, options.batch_size, config.train.seed, windows=True)
    steps = range(options.steps + options.warm + 2)
    return [rows.starts(np.arange(options.batch_size) + step * options.batch_size).tolist() for step in steps]


# ---------------------------------------------------------------- transformers


def run_transformers(options: argparse.Namespace, turn: Turn) -> None:
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

    config = GPT2Config(
        options.vocab,
        options.seq_len,
        options.width,
        options.layers,
        options.heads,
        activation_function="gelu_pytorch_tanh",
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.use_cache, config._attn_implementation, config.loss_type = False, "sdpa", "ForCausalLM"
    model = GPT2LMHeadModel(config)
    values = as_gpt(fresh(options))
    order = ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    names = ["wte.weight", "wpe.weight"]
    names += [f"h.{n}.{part}.{kind}" for n in range(options.layers) for part in order for kind in ("weight", "bias")]
    reference_weights = dict(model.transformer.named_parameters())
    for name, value in zip([*names, "ln_f.weight", "ln_f.bias"], values, strict=True):
        turned = value.dim() == 2 and ".c_" in name  # their layers store [in, out]
        reference_weights[name].data.copy_(value.mT if turned else value)
    store = np.memmap(options.store / "tokens-00000.bin", "<u2", "r")

    class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __init__(self) -> None:
            self.starts = [at for starts in all_starts(options) for at in starts]

        def __len__(self) -> int:
            return len(self.starts)

        def __getitem__(self, number: int) -> dict[str, Tensor]:
            at = self.starts[number]
            row = torch.from_numpy(store[at : at + options.seq_len + 1].astype(np.int64))
            return {"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]}  # already shifted

    class Ordered(transformers.Trainer):
        loss = 0.0

        def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler[int]:
            return torch.utils.data.SequentialSampler(Rows())

        def training_step(self, *given: object, **named: object) -> Tensor:
            loss: Tensor = super().training_step(*given, **named)
            self.loss = loss.item()
            return loss

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: object, **__: object) -> None:
            turn.say()

        def on_step_end(self, *_: object, **__: object) -> None:
            turn.over(trainer.loss)

    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out,
            use_cpu=True,
            bf16=options.precision == "bf16",
            per_device_train_batch_size=options.batch_size,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=DECAY,
            max_grad_norm=CLIP,
            optim="adamw_torch_fused",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            torch_compile=options.compile,
        )
        trainer = Ordered(model=model, args=arguments, train_dataset=Rows(), callbacks=[Turns()])
        trainer.train()


# ---------------------------------------------------------------- alternation

PEERS: dict[str, Callable[[argparse.Namespace, Turn], None]] = {
    "kvad": run_kvad,
    "nanogpt": run_nanogpt,
    "transformers": run_transformers,
}


class Peer:
    """Parent's side of a child process."""

    def __init__(self, name: str, options: list[str]) -> None:
        command = [sys.executable, __file__, *options, "--child", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name, self.steps = name, list[dict[str, float]]()
        self._read()

    def _read(self) -> dict[str, float]:
        out: IO[str] | None = self._process.stdout
        assert out is not None
        line = out.readline()
        if not line:
            raise SystemExit(f"{self.name}: ended with code {self._process.wait()}")
        results: dict[str, float] = json.loads(line)
        return results

    def step(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self.steps.append(self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def results(self, options: argparse.Namespace) -> dict[str, float]:
        middle = statistics.median(step[options.clock] for step in self.steps[options.warm :])
        return {
            "step_ms": round(1e3 * middle, 1),
            "tokens_per_s": round(options.batch_size * options.seq_len / middle, 1),
            "first": round(self.steps[0]["loss"], 6),
            "last": round(self.steps[-1]["loss"], 6),
            "peak_mb": round(self.steps[-1]["peak"]),
        }


def by_turns(options: argparse.Namespace, precision: str, folder: Path) -> dict[str, object]:
    given = ("layers", "width", "heads", "vocab", "batch-size", "seq-len", "steps", "warm")
    arguments = [word for name in given for word in (f"--{name}", str(getattr(options, name.replace("-", "_"))))]
    arguments += ["--store", str(folder), "--precision", precision] + ["--compile"] * options.compile
    peers = [Peer(name, arguments) for name in options.peers]
    for _ in range(options.warm + options.steps):
        for peer in peers:
            peer.step()
    for peer in peers:
        peer.close()
    results = {peer.name: peer.results(options) for peer in peers}
    first = [values["first"] for values in results.values()]
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    assert max(first) - min(first) <= tolerance, f"this is not the same work: {results}"
    others = [values["tokens_per_s"] for name, values in results.items() if name != "kvad"]
    has_both = "kvad" in results and others
    times = {"times": round(results["kvad"]["tokens_per_s"] / max(others), 3)} if has_both else {}
    return {"precision": precision, **results, **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 12, "width": 768, "heads": 12, "vocab": 50304, "batch-size": 4, "seq-len": 512}
    for name, size in {**sizes, "steps": 5, "warm": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--clock", choices=["cpu", "wall"], default="wall")
    parser.add_argument("--compile", action="store_true", help="as each of them compiles")
    parser.add_argument("--child", choices=list(PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        options.precision = options.precision[0]
        PEERS[options.child](options, Turn())
        return
    if "transformers" in options.peers and not (find_spec("transformers") and find_spec("accelerate")):
        parser.error(
            "transformers.Trainer is not installed: pip install transformers accelerate, or --peers kvad nanogpt"
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_store(folder, options.vocab)
        for precision in options.precision:
            results = by_turns(options, precision, folder)
            report = {"clock": options.clock, "threads": torch.get_num_threads(), "steps": options.steps}
            report |= {size: vars(options)[size] for size in (name.replace("-", "_") for name in sizes)} | {
                "compile": options.compile
            }
            print(json.dumps({**results, **report, "commit": commit_id(), "machine": machine_info()}), flush=True)


if __name__ == "__main__":
    main()

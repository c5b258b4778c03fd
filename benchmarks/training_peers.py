"""A training step of GPT-2's shape: kvad, a loop as nanoGPT's, and transformers.Trainer, a step of each by turns.

    python benchmarks/training_peers.py --precision fp32                              # GPT-2 124M, 4 rows of 512 tokens
    OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 nice python benchmarks/training_peers.py --clock cpu      # on a busy machine
    python benchmarks/training_peers.py --layers 4 --width 128 --heads 4 --vocab 66 --batch 12 --context 64 --steps 50

Each peer is a process of its own that runs its own loop, and waits within it for its turn: ``kvad`` is ``Trainer.fit``
over ``DocumentData``; ``nanogpt`` is the loop that nanoGPT's README describes, written here from that in plain PyTorch;
``transformers`` is ``Trainer.train`` of ``GPT2LMHeadModel`` (``pip install transformers accelerate``).  For all of
them: the same weights, the same rows of random tokens, the same function (tanh GELU, learned positions, biases, a
tied head), scaled_dot_product_attention, fused AdamW with the same groups, a gradient clipped at 1.0, no dropout.

One JSON line per precision: medians of a step in milliseconds, tokens per second, and how many times the better peer
kvad is.  ``first`` and ``last`` are losses: that work is equal is checked on the first (1e-4 in fp32, before any
update), and the last, after all updates, says that optimizers are too.  ``peak_mb``: the most memory that each process
ever held.
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

from kvad.benchmarks.cache_speed import commit_id, machine_info
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
from kvad.train.data.document_dataset import DocumentDataset, RowOrder
from kvad.train.data.token_store import TokenStore
from kvad.train.loop.checkpointer import AsyncCheckpointer
from kvad.train.loop.trainer import Trainer, TrainerState
from kvad.train.monitoring.callbacks import Callback, StartReport, StepReport
from kvad.train.objectives.cross_entropy import Autocast, CrossEntropyObjective
from kvad.train.optim.optimizer import OptimizersContainer

LR, BETAS, DECAY, CLIP = 6e-4, (0.9, 0.95), 0.1, 1.0
TOKENS = 1 << 18


class Turn:
    """The child's end: says what a step took, and waits until it is told to go on."""

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


def shape(asked: argparse.Namespace) -> ModelConfig:
    mixer = AttentionConfig(asked.heads, position=None, qkv_bias=True, out_bias=True)
    layer = LayerConfig(
        mixer, PlainMLPConfig(4 * asked.width, "gelu_tanh", bias=True), NormConfig("layer", 1e-5, bias=True)
    )
    embed = EmbeddingConfig(LearnedPositionsConfig(asked.context))
    return ModelConfig(
        asked.width, asked.vocab, asked.context, StackConfig(asked.layers, {"L": layer}), embedding=embed
    )


def settings(asked: argparse.Namespace) -> RunConfig:
    optim = {"lr": LR, "schedule": "constant", "warmup_steps": 0, "beta1": BETAS[0], "beta2": BETAS[1]}
    return RunConfig.from_dict(
        {
            "data": {"seq_len": asked.context, "order": "windows"},
            "optim": {**optim, "weight_decay": DECAY, "max_grad_norm": CLIP},
            "train": {"steps": 10**6, "batch_size": asked.batch, "precision": asked.precision, "eval_interval": 10**6}
            | {"save_interval": 10**6, "compile": asked.compile},
        }
    )


def write_store(folder: Path, vocab: int) -> None:
    """One long document of random tokens, as ``kvad data prepare`` would leave it."""
    tokens = np.random.default_rng(0).integers(0, vocab, TOKENS)
    tokens.astype("<u2").tofile(folder / "tokens-00000.bin")
    np.array([0, TOKENS], "<u8").tofile(folder / "offsets.bin")


def open_store(folder: Path) -> TokenStore:
    return TokenStore(
        folder, {"key": "", "dtype": "uint16", "shards": [{"file": "tokens-00000.bin", "tokens": TOKENS}]}
    )


# ---------------------------------------------------------------- kvad


def run_kvad(asked: argparse.Namespace, turn: Turn) -> None:
    from kvad.train.loop.acceleration import apply_acceleration

    config, model = settings(asked), fresh(asked)
    apply_acceleration(model, config.train)
    data = DocumentDataset(open_store(asked.store), config)
    objective = CrossEntropyObjective(model, Autocast(asked.precision, "cpu"))

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


def fresh(asked: argparse.Namespace) -> Transformer:
    torch.manual_seed(0)
    return Transformer(shape(asked))


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
    def __init__(self, asked: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(asked.vocab, asked.width)
        self.positions = nn.Embedding(asked.context, asked.width)
        self.blocks = nn.ModuleList(Block(asked.width, asked.heads) for _ in range(asked.layers))
        self.norm = nn.LayerNorm(asked.width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def run_nanogpt(asked: argparse.Namespace, turn: Turn) -> None:
    model = GPT(asked).train()
    model.load_state_dict(dict(zip(model.state_dict(), as_gpt(fresh(asked)), strict=True)))
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
    run = torch.compile(model) if asked.compile else model
    autocast = torch.autocast("cpu", torch.bfloat16) if asked.precision == "bf16" else nullcontext()
    store = np.memmap(asked.store / "tokens-00000.bin", "<u2", "r")
    turn.say()
    for starts in all_starts(asked):
        rows = [torch.from_numpy(store[at : at + asked.context + 1].astype(np.int64)) for at in starts]
        inputs, targets = torch.stack([row[:-1] for row in rows]), torch.stack([row[1:] for row in rows])
        with autocast:
            loss = run(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turn.over(loss.item())


def as_gpt(model: Transformer) -> list[Tensor]:
    """kvad's weights in the order of :class:`GPT`'s."""
    of = model.state_dict()
    found = [of["embed.tokens.weight"], of["embed.positions.weight"]]
    for number in range(len(model.stack.layers)):
        for name in ("norm1", "norm2", "mixer.qkv", "mixer.out", "mlp.up", "mlp.down"):
            for kind in ("weight", "bias"):
                names = [f"mixer.{part}" for part in "qkv"] if name == "mixer.qkv" else [name]
                found.append(torch.cat([of[f"decoder.layers.{number}.{each}.{kind}"] for each in names]))
    return [*found, of["decoder.norm.weight"], of["decoder.norm.bias"]]


def all_starts(asked: argparse.Namespace) -> list[list[int]]:
    """Where the rows of each step begin: kvad's own order."""
    config, store = settings(asked), open_store(asked.store)
    training = DocumentDataset(store, config).training
    assert training.spans[0, 0] == 0, "the first tokens are for training"
    order = RowOrder("windows", len(training), asked.context, asked.batch, config.train.seed)
    return [order.starts(step).tolist() for step in range(asked.steps + asked.warm + 2)]


# ---------------------------------------------------------------- transformers


def run_transformers(asked: argparse.Namespace, turn: Turn) -> None:
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

    config = GPT2Config(
        asked.vocab, asked.context, asked.width, asked.layers, asked.heads, activation_function="gelu_pytorch_tanh"
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.use_cache, config._attn_implementation, config.loss_type = False, "sdpa", "ForCausalLM"
    model = GPT2LMHeadModel(config)
    values = as_gpt(fresh(asked))
    order = ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    names = ["wte.weight", "wpe.weight"]
    names += [f"h.{n}.{part}.{kind}" for n in range(asked.layers) for part in order for kind in ("weight", "bias")]
    theirs = dict(model.transformer.named_parameters())
    for name, value in zip([*names, "ln_f.weight", "ln_f.bias"], values, strict=True):
        turned = value.dim() == 2 and ".c_" in name  # their layers hold [in, out]
        theirs[name].data.copy_(value.mT if turned else value)
    store = np.memmap(asked.store / "tokens-00000.bin", "<u2", "r")

    class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __init__(self) -> None:
            self.starts = [at for starts in all_starts(asked) for at in starts]

        def __len__(self) -> int:
            return len(self.starts)

        def __getitem__(self, number: int) -> dict[str, Tensor]:
            at = self.starts[number]
            row = torch.from_numpy(store[at : at + asked.context + 1].astype(np.int64))
            return {"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]}  # shifted here already

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
            bf16=asked.precision == "bf16",
            per_device_train_batch_size=asked.batch,
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
            torch_compile=asked.compile,
        )
        trainer = Ordered(model=model, args=arguments, train_dataset=Rows(), callbacks=[Turns()])
        trainer.train()


# ---------------------------------------------------------------- by turns

PEERS: dict[str, Callable[[argparse.Namespace, Turn], None]] = {
    "kvad": run_kvad,
    "nanogpt": run_nanogpt,
    "transformers": run_transformers,
}


class Peer:
    """The parent's end of a child."""

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
        found: dict[str, float] = json.loads(line)
        return found

    def step(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self.steps.append(self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def found(self, asked: argparse.Namespace) -> dict[str, float]:
        middle = statistics.median(step[asked.clock] for step in self.steps[asked.warm :])
        return {
            "step_ms": round(1e3 * middle, 1),
            "tokens_per_s": round(asked.batch * asked.context / middle, 1),
            "first": round(self.steps[0]["loss"], 6),
            "last": round(self.steps[-1]["loss"], 6),
            "peak_mb": round(self.steps[-1]["peak"]),
        }


def by_turns(asked: argparse.Namespace, precision: str, folder: Path) -> dict[str, object]:
    given = ("layers", "width", "heads", "vocab", "batch", "context", "steps", "warm")
    options = [word for name in given for word in (f"--{name}", str(getattr(asked, name)))]
    options += ["--store", str(folder), "--precision", precision] + ["--compile"] * asked.compile
    peers = [Peer(name, options) for name in asked.peers]
    for _ in range(asked.warm + asked.steps):
        for peer in peers:
            peer.step()
    for peer in peers:
        peer.close()
    found = {peer.name: peer.found(asked) for peer in peers}
    first = [values["first"] for values in found.values()]
    near = 1e-4 if precision == "fp32" else 2e-2
    assert max(first) - min(first) <= near, f"this is not the same work: {found}"
    others = [values["tokens_per_s"] for name, values in found.items() if name != "kvad"]
    times = (
        {"perplexity_ratio": round(found["kvad"]["tokens_per_s"] / max(others), 3)}
        if "kvad" in found and others
        else {}
    )
    return {"precision": precision, **found, **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 12, "width": 768, "heads": 12, "vocab": 50304, "batch": 4, "context": 512}
    for name, size in {**sizes, "steps": 5, "warm": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--clock", choices=["cpu", "wall"], default="wall")
    parser.add_argument("--compile", action="store_true", help="as each of them compiles")
    parser.add_argument("--child", choices=list(PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child is not None:
        asked.precision = asked.precision[0]
        PEERS[asked.child](asked, Turn())
        return
    if "transformers" in asked.peers and not (find_spec("transformers") and find_spec("accelerate")):
        parser.error("transformers.Trainer is not here: pip install transformers accelerate, or --peers kvad nanogpt")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_store(folder, asked.vocab)
        for precision in asked.precision:
            found = by_turns(asked, precision, folder)
            said = {"clock": asked.clock, "threads": torch.get_num_threads(), "steps": asked.steps}
            said |= {size: getattr(asked, size) for size in sizes} | {"compile": asked.compile}
            print(json.dumps({**found, **said, "commit": commit_id(), "machine": machine_info()}), flush=True)


if __name__ == "__main__":
    main()

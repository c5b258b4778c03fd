"""A KV cache on one page: section 4.19 of note 004 made right, in plain PyTorch (docs/notes.md says what was wrong).

    python examples/cache.py                                  # random weights: shows that cached == uncached
    python examples/cache.py runs/demo "5 17 3" "8 2 9 9 4"   # a checkpoint that kvad trained, two prompts of token ids

The cache is ``k, v [layers, batch, kv_heads, capacity, head_dim]``, allocated once, with one cursor per stream.  Keys
are stored rotated.  Slot j of a stream holds the token at position j, so "who sees whom" is one comparison of
positions: ``key position <= query position``.  It hides the future, the padding of ragged prompts (written past the
cursor, overwritten before any query gets there) and whatever lies beyond.  Streams never share a row, so no mask has to
keep them apart.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu


class Model:
    """A decoder as ``kvad demo`` trains it: RoPE, grouped queries, RMSNorm before each half, SwiGLU."""

    def __init__(self, weights: dict[str, Tensor], heads: int, kv_heads: int, theta: float, eps: float) -> None:
        self.weights, self.heads, self.kv_heads, self.eps = weights, heads, kv_heads, eps
        self.layers = sum(name.endswith("mixer.q.weight") for name in weights)
        self.dim = weights["decoder.layers.0.mixer.q.weight"].shape[0] // heads
        self.inv_freq = 1 / theta ** (torch.arange(0, self.dim, 2).float() / self.dim)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, heads, L, D]: dimensions i and i + D/2 are a pair, turned by position * theta^(-2i/D)."""
        angle = positions[:, None, :, None] * self.inv_freq
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def forward(self, tokens: Tensor, lengths: Tensor, cache: "Cache") -> Tensor:
        """tokens [B, L] new ones, right-padded; lengths [B] how many of them are real -> logits [B, L, V]."""
        w, (batch, new) = self.weights, tokens.shape
        positions = cache.cursor[:, None] + torch.arange(new)  # [B, L]: each stream goes on where it stands
        if int(positions.max()) >= cache.capacity:
            raise SystemExit(f"the cache holds {cache.capacity} tokens, position {int(positions.max())} was asked for")
        x = w["embed.tokens.weight"][tokens]
        for i in range(self.layers):
            at = f"decoder.layers.{i}."
            h = rms_norm(x, x.shape[-1:], w[at + "norm1.weight"], self.eps)
            q, k, v = (linear(h, w[f"{at}mixer.{name}.weight"]) for name in ("q", "k", "v"))
            q, k, v = (y.view(batch, new, -1, self.dim).transpose(1, 2) for y in (q, k, v))
            k, v = cache.write(i, self.rotate(k, positions), v, positions)
            y = self.attend(self.rotate(q, positions), k, v, positions)
            x = x + linear(y.transpose(1, 2).flatten(2), w[at + "mixer.out.weight"])
            h = rms_norm(x, x.shape[-1:], w[at + "norm2.weight"], self.eps)
            gate, up = linear(h, w[at + "mlp.gate.weight"]), linear(h, w[at + "mlp.up.weight"])
            x = x + linear(silu(gate) * up, w[at + "mlp.down.weight"])
        cache.cursor += lengths  # once per step, not once per layer: all layers write the same slots
        x = rms_norm(x, x.shape[-1:], w["decoder.norm.weight"], self.eps)
        return linear(x, w.get("head.weight", w["embed.tokens.weight"]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """q [B, H, L, D], k and v [B, K, S, D] -> [B, H, L, D]; query head h reads key-value head h // (H / K)."""
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        scores = torch.einsum("bhld,bhsd->bhls", q, k) / self.dim**0.5
        seen = torch.arange(k.shape[2]) <= positions[:, :, None]  # [B, L, S]; slot j holds position j
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(dim=-1)  # never empty: one sees oneself
        return torch.einsum("bhls,bhsd->bhld", weights, v)


class Cache:
    """Room for ``capacity`` tokens of each stream, allocated once; zeros, for 0 * NaN would be NaN behind any mask."""

    def __init__(self, model: Model, batch: int, capacity: int) -> None:
        shape = (model.layers, batch, model.kv_heads, capacity, model.dim)
        self.k, self.v = (torch.zeros(shape, dtype=model.weights["decoder.norm.weight"].dtype) for _ in range(2))
        self.cursor = torch.zeros(batch, dtype=torch.long)  # tokens that each stream holds
        self.capacity = capacity

    def write(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Puts k, v [B, K, L, D] into their slots; returns what may be read: views, up to the furthest stream."""
        rows = torch.arange(len(positions))[:, None]
        self.k[layer, rows, :, positions] = k.transpose(1, 2)  # rows and positions [B, L] index to the front
        self.v[layer, rows, :, positions] = v.transpose(1, 2)
        longest = int(positions.max()) + 1
        return self.k[layer, :, :, :longest], self.v[layer, :, :, :longest]


def prefill(model: Model, prompts: list[list[int]], cache: Cache) -> Tensor:
    """Ragged prompts in one step -> each stream's last logits [B, V]."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    padded = [prompt + [0] * (int(lengths.max()) - len(prompt)) for prompt in prompts]
    return model.forward(torch.tensor(padded), lengths, cache)[torch.arange(len(prompts)), lengths - 1]


def generate(model: Model, prompts: list[list[int]], steps: int) -> tuple[list[list[int]], Tensor]:
    """Greedy: one prefill, then one token of every stream per step -> the new tokens, the logits [steps, B, V]."""
    cache = Cache(model, len(prompts), capacity=max(map(len, prompts)) + steps)
    logits = [prefill(model, prompts, cache)]
    while len(logits) < steps:
        newest = logits[-1].argmax(dim=-1, keepdim=True)
        logits.append(model.forward(newest, torch.ones(len(prompts), dtype=torch.long), cache)[:, -1])
    return torch.stack(logits).argmax(dim=-1).T.tolist(), torch.stack(logits)


def without_cache(model: Model, prompts: list[list[int]], steps: int) -> tuple[list[list[int]], Tensor]:
    """The same, each stream alone, and everything computed anew for every token."""
    streams, logits = [list(prompt) for prompt in prompts], []
    for _ in range(steps):
        logits.append(torch.cat([prefill(model, [s], Cache(model, 1, capacity=len(s))) for s in streams]))
        streams = [[*s, t] for s, t in zip(streams, logits[-1].argmax(dim=-1).tolist(), strict=True)]
    return [s[len(p) :] for s, p in zip(streams, prompts, strict=True)], torch.stack(logits)


def load(folder: Path) -> Model:
    """A checkpoint of kvad's, or a run's newest; refuses what this page does not do."""
    folder = max(folder.glob("checkpoints/step-*"), default=folder)
    config = json.loads((folder / "config.json").read_text())["model"]
    decoder, head, weights = config["decoder"], config["head"], load_file(folder / "model.safetensors")
    layer = decoder["kinds"][decoder["pattern"][0]]
    mixer, norm, mlp, rope = layer["mixer"], layer["norm"], layer["mlp"], layer["mixer"]["position"] or {}
    found = [rope.get(key) for key in ("kind", "fraction", "interleaved", "scaling")]
    found += [decoder["norm_place"], norm["kind"], norm["unit_offset"], mlp["kind"], mlp["activation"]]
    found += [mixer[key] for key in ("scale", "softcap", "window", "value_dim", "clip")]
    found += [len(decoder["kinds"]), config["encoder"], {k: v for k, v in config["embed"].items() if v}, mixer["own"]]
    found += [head[key] for key in ("scale", "softcap", "transform")]
    parts = {"q", "k", "v", "out", "gate", "up", "down", "norm1", "norm2", "norm", "tokens", "head"}
    found += [name for name in weights if name.split(".")[-2] not in parts or not name.endswith("weight")]
    page = ["rope", 1, False, None, "pre", "rms", False, "gated", "silu", "default", None, None, None, None]
    if found != [*page, 1, None, {"scale": 1, "project": "end"}, None, 1, None, None]:
        raise SystemExit(f"{folder}: this page does RoPE, RMSNorm before each half and SwiGLU only, not {found}")
    return Model(weights, mixer["heads"], mixer["kv_heads"] or mixer["heads"], rope["theta"], norm["eps"])


def tiny(layers: int = 2, vocab: int = 32, width: int = 24) -> Model:
    """Random weights: 4 query heads on 2 key-value heads of 8, in float64, so that equal means equal."""
    shapes: dict[str, tuple[int, ...]] = {"embed.tokens": (vocab, width), "decoder.norm": (width,)}
    for i in range(layers):
        mixer = {"mixer.q": (32, width), "mixer.k": (16, width), "mixer.v": (16, width), "mixer.out": (width, 32)}
        mlp = {"mlp.gate": (48, width), "mlp.up": (48, width), "mlp.down": (width, 48)}
        parts = {**mixer, **mlp, "norm1": (width,), "norm2": (width,)}
        shapes |= {f"decoder.layers.{i}.{name}": shape for name, shape in parts.items()}
    random = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
    return Model({f"{name}.weight": w * w.shape[-1] ** -0.25 for name, w in weights.items()}, 4, 2, 1e4, 1e-5)


def main(arguments: list[str]) -> None:
    model = load(Path(arguments[0])) if arguments else tiny()
    prompts = [[int(t) for t in text.split()] for text in arguments[1:]] or [[3, 1, 4, 1, 5], [9, 2], [6]]
    cached, a = generate(model, prompts, steps=16)
    uncached, b = without_cache(model, prompts, steps=16)
    for prompt, new in zip(prompts, cached, strict=True):
        print(*prompt, "->", *new)
    print(f"cached == uncached: {cached == uncached}, max |dlogit| {(a - b).abs().max():.1e}")


if __name__ == "__main__":
    with torch.inference_mode():
        main(sys.argv[1:])

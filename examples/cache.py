"""A KV cache on one page, in plain PyTorch: section 4.19 of note 004, corrected (see docs/reference/notes.md).

    python examples/cache.py                                  # random weights: cached equals uncached
    python examples/cache.py runs/demo "5 17 3" "8 2 9 9 4"   # a run of kvad or a Llama, two prompts of token ids

The cache is ``k, v [layers, batch, kv_heads, capacity, head_dim]``, allocated once, with one cursor per sequence. Keys
are stored rotated. Slot j of a sequence stores the token at position j, so visibility is one comparison of positions:
``key position <= query position``. It hides future tokens, the padding of shorter prompts (written past the cursor, and
overwritten before a query reaches it) and unused slots. Sequences never share a row of the batch, so no mask separates
them.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu


class Model:
    """A decoder like that of ``kvad demo``: RoPE, grouped queries, pre-norm RMSNorm, SwiGLU."""

    def __init__(self, weights: dict[str, Tensor], heads: int, kv_heads: int, theta: float, eps: float) -> None:
        self.weights, self.heads, self.kv_heads, self.eps = weights, heads, kv_heads, eps
        self.layers = sum(name.endswith("attention.q.weight") for name in weights)
        self.dim = weights["decoder.layers.0.attention.q.weight"].shape[0] // heads
        self.inv_freq = 1 / theta ** (torch.arange(0, self.dim, 2).float() / self.dim)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [B, heads, L, D]: the pair of dims i and i + D/2 by position * theta^(-2i/D)."""
        angle = positions[:, None, :, None] * self.inv_freq
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def forward(self, tokens: Tensor, lengths: Tensor, cache: "Cache") -> Tensor:
        """Compute logits [B, L, V] of new tokens [B, L], right-padded to L; lengths [B] without padding."""
        w, (batch, new) = self.weights, tokens.shape
        positions = cache.cursor[:, None] + torch.arange(new)  # [B, L]: each sequence continues at its cursor
        if int(positions.max()) >= cache.capacity:
            raise SystemExit(f"capacity: must exceed position {int(positions.max())}, got {cache.capacity}")
        x = w["embedding.tokens.weight"][tokens]
        for i in range(self.layers):
            at = f"decoder.layers.{i}."
            h = rms_norm(x, x.shape[-1:], w[at + "norm1.weight"], self.eps)
            q, k, v = (linear(h, w[f"{at}attention.{name}.weight"]) for name in ("q", "k", "v"))
            q, k, v = (y.view(batch, new, -1, self.dim).transpose(1, 2) for y in (q, k, v))
            k, v = cache.write(i, self.rotate(k, positions), v, positions)
            y = self.attend(self.rotate(q, positions), k, v, positions)
            x = x + linear(y.transpose(1, 2).flatten(2), w[at + "attention.out.weight"])
            h = rms_norm(x, x.shape[-1:], w[at + "norm2.weight"], self.eps)
            gate, up = linear(h, w[at + "mlp.gate.weight"]), linear(h, w[at + "mlp.up.weight"])
            x = x + linear(silu(gate) * up, w[at + "mlp.down.weight"])
        cache.cursor += lengths  # once per step, because all layers write the same slots
        x = rms_norm(x, x.shape[-1:], w["decoder.norm.weight"], self.eps)
        return linear(x, w.get("head.weight", w["embedding.tokens.weight"]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """Attend with q [B, H, L, D], k and v [B, K, S, D] -> [B, H, L, D]; head h reads kv head h // (H / K)."""
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        scores = torch.einsum("bhld,bhsd->bhls", q, k) / self.dim**0.5
        seen = torch.arange(k.shape[2]) <= positions[:, :, None]  # [B, L, S]; slot j stores position j
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(dim=-1)  # never empty: a token sees itself
        return torch.einsum("bhls,bhsd->bhld", weights, v)


class Cache:
    """Slots for ``capacity`` tokens per sequence, zeroed, because 0 * NaN is NaN behind any mask."""

    def __init__(self, model: Model, batch: int, capacity: int) -> None:
        shape = (model.layers, batch, model.kv_heads, capacity, model.dim)
        self.k, self.v = (torch.zeros(shape, dtype=model.weights["decoder.norm.weight"].dtype) for _ in range(2))
        self.cursor = torch.zeros(batch, dtype=torch.long)  # number of tokens of each sequence
        self.capacity = capacity

    def write(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v [B, K, L, D] to their slots; return views of all slots up to the longest sequence."""
        rows = torch.arange(len(positions))[:, None]
        self.k[layer, rows, :, positions] = k.transpose(1, 2)  # rows and positions [B, L] index to the front
        self.v[layer, rows, :, positions] = v.transpose(1, 2)
        longest = int(positions.max()) + 1
        return self.k[layer, :, :, :longest], self.v[layer, :, :, :longest]


def prefill(model: Model, prompts: list[list[int]], cache: Cache) -> Tensor:
    """Compute prompts of any lengths in one step -> the last logits of each [B, V]."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    padded = [prompt + [0] * (int(lengths.max()) - len(prompt)) for prompt in prompts]
    return model.forward(torch.tensor(padded), lengths, cache)[torch.arange(len(prompts)), lengths - 1]


def generate(model: Model, prompts: list[list[int]], steps: int) -> tuple[list[list[int]], Tensor]:
    """Generate greedily, one token per sequence and step -> the new tokens, the logits [steps, B, V]."""
    cache = Cache(model, len(prompts), capacity=max(map(len, prompts)) + steps)
    logits = [prefill(model, prompts, cache)]
    while len(logits) < steps:
        newest = logits[-1].argmax(dim=-1, keepdim=True)
        logits.append(model.forward(newest, torch.ones(len(prompts), dtype=torch.long), cache)[:, -1])
    return torch.stack(logits).argmax(dim=-1).T.tolist(), torch.stack(logits)


def without_cache(model: Model, prompts: list[list[int]], steps: int) -> tuple[list[list[int]], Tensor]:
    """Generate without a cache: each sequence alone, recomputed for every token."""
    sequences, logits = [list(prompt) for prompt in prompts], []
    for _ in range(steps):
        logits.append(torch.cat([prefill(model, [s], Cache(model, 1, capacity=len(s))) for s in sequences]))
        sequences = [[*s, t] for s, t in zip(sequences, logits[-1].argmax(dim=-1).tolist(), strict=True)]
    return [s[len(p) :] for s, p in zip(sequences, prompts, strict=True)], torch.stack(logits)


def load(folder: Path) -> Model:
    """Load a folder, or the newest checkpoint of a run; exit if the model needs more than this page."""
    folder = max(folder.glob("checkpoints/step-*"), default=folder)
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    return load_kvad(folder, config["model"], weights) if "model" in config else load_llama(folder, config, weights)


def load_llama(folder: Path, config: dict, weights: dict[str, Tensor]) -> Model:
    """Build the model of Hugging Face's layout, which `kvad train` writes; its names are replaced by kvad's."""
    options = [config["model_type"], *(config.get(key) for key in ("rope_scaling", "attention_bias", "mlp_bias"))]
    if options[0] != "llama" or any(options[1:]) or config["hidden_act"] != "silu":
        raise SystemExit(f"{folder}: must be a Llama without rope scaling and biases, got {options}")
    names = {"model.embed_tokens": "embedding.tokens", "model.": "decoder.", "self_attn": "attention", "_proj": ""}
    names |= {".o.": ".out.", "input_layernorm": "norm1", "post_attention_layernorm": "norm2", "lm_head": "head"}
    for old, new in names.items():
        weights = {name.replace(old, new): weight for name, weight in weights.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return Model(weights, heads, kv_heads, config["rope_theta"], config["rms_norm_eps"])


def load_kvad(folder: Path, config: dict, weights: dict[str, Tensor]) -> Model:
    """Build the model of kvad's own layout."""
    decoder, head = config["decoder"], config["head"]
    layer = decoder["layer_types"][decoder["layer_pattern"][0]]
    attention, norm, mlp, rope = layer["attention"], layer["norm"], layer["mlp"], layer["attention"]["position"] or {}
    options = [rope.get(key) for key in ("kind", "partial_rotary_factor", "interleaved", "scaling")]
    options += [decoder["norm_position"], norm["kind"], norm["unit_offset"], mlp["kind"], mlp["activation"]]
    options += [attention[key] for key in ("softmax_scale", "logit_softcap", "window", "value_dim", "clip_qkv")]
    options += [len(decoder["layer_types"]), config["encoder"], {k: v for k, v in config["embedding"].items() if v}]
    options += [attention["custom_class"], *(head[key] for key in ("logit_scale", "logit_softcap", "transform"))]
    parts = {"q", "k", "v", "out", "gate", "up", "down", "norm1", "norm2", "norm", "tokens", "head"}
    options += [name for name in weights if name.split(".")[-2] not in parts or not name.endswith("weight")]
    page = ["rope", 1, False, None, "pre", "rms", False, "gated", "silu", "default", None, None, None, None]
    if options != [*page, 1, None, {"scale": 1, "projection": "end"}, None, 1, None, None]:
        raise SystemExit(f"{folder}: must have RoPE, pre-norm RMSNorm and SwiGLU, got {options}")
    heads, kv_heads = attention["num_heads"], attention["num_kv_heads"]
    return Model(weights, heads, kv_heads or heads, rope["theta"], norm["eps"])


def tiny(layers: int = 2, vocab: int = 32, width: int = 24) -> Model:
    """Build a model with random weights: 4 query heads, 2 kv heads of dim 8, in float64 for exact comparison."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.tokens": (vocab, width), "decoder.norm": (width,)}
    for i in range(layers):
        attention = {"attention.q": (32, width), "attention.k": (16, width), "attention.v": (16, width)}
        mlp = {"mlp.gate": (48, width), "mlp.up": (48, width), "mlp.down": (width, 48)}
        parts = {**attention, "attention.out": (width, 32), **mlp, "norm1": (width,), "norm2": (width,)}
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

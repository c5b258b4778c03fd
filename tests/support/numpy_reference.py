"""A Transformer in float64 NumPy, written from the papers; it shares only names with kvad.

``config`` is the config as plain values (``ModelConfig.to_dict()``), ``weights`` the parameters by their names in a
checkpoint. One sequence, one head and one query at a time: no masks, batches or caches.

    logits = Reference(config, weights).logits(target, source)      # [L, V]

RoPE's frequencies and angles are float64 here and float32 in kvad: a test chooses frequencies that are powers of two
and passes them to kvad as float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Config = Mapping[str, Any]


class Reference:
    def __init__(self, config: Config, weights: Mapping[str, Array]) -> None:
        self.config = config
        self.weights = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}

    # ------------------------------------------------------------ the model

    def logits(self, tokens: Sequence[int], source: Sequence[int] | None = None) -> Array:
        """Return [L, V] of a decoder or a masked language model, or [L, labels] of a tagger."""
        return self.scores(self.hidden(tokens, source))

    def hidden(self, tokens: Sequence[int], source: Sequence[int] | None = None) -> Array:
        """Return [L, E], the last states of the decoder, or of an encoder without a decoder."""
        if self.config["decoder"] is None:
            return self.encode(tokens)
        memory = None if source is None else self.encode(source)
        return self.stack("decoder", self.embed("embedding", self.config["embedding"], tokens), memory)

    def encode(self, tokens: Sequence[int], segments: Sequence[int] | None = None) -> Array:
        """Return [S, E], the encoder's states of a source."""
        side = self.config["encoder_input"]
        if side is None:
            return self.stack("encoder", self.embed("embedding", self.config["embedding"], tokens, segments))
        table = "embedding" if side["vocab_size"] is None else "encoder_embedding"
        return self.stack("encoder", self.embed("encoder_embedding", side["embedding"], tokens, table=table))

    def pooled_output(self, hidden: Array) -> Array:
        """Map [L, E] of one sequence to its class scores [labels] or its embedding [E]."""
        head = self.config["head"]
        pooled = hidden[0] if head["pool"] == "first" else sum(hidden) / len(hidden)
        out = self.transform(pooled, head["transform"])
        if head["kind"] == "classification":
            return self.linear("head", out)
        return out / math.sqrt(sum(x * x for x in out)) if head["normalize"] else out

    def scores(self, hidden: Array) -> Array:
        head = self.config["head"]
        out = np.stack([self.transform(x, head["transform"]) for x in hidden])
        if head["kind"] == "classification":
            return np.stack([self.linear("head", x) for x in out])
        name = "embedding.tokens.weight" if self.config["tie_embeddings"] else "head.weight"
        logits = out @ self.weights[name].T
        logits = head["logit_scale"] * (logits + self.weights.get("head.bias", 0.0))
        return (
            logits if head["logit_softcap"] is None else head["logit_softcap"] * np.tanh(logits / head["logit_softcap"])
        )

    def transform(self, x: Array, spec: Config | None) -> Array:
        if spec is None:
            return x
        x = self.linear("head.transform.dense", x)
        x = x if spec["activation"] is None else activation(spec["activation"], x)
        return x if spec["norm"] is None else self.norm("head.transform.norm", spec["norm"], x)

    # ------------------------------------------------------------ embedding

    def embed(
        self,
        name: str,
        spec: Config,
        tokens: Sequence[int],
        segments: Sequence[int] | None = None,
        table: str | None = None,
    ) -> Array:
        rows = []
        for at, token in enumerate(tokens):
            x = spec["scale"] * self.weights[f"{table or name}.tokens.weight"][token]
            if spec["embedding_size"] is not None and spec["projection"] == "start":
                x = self.linear(f"{name}.projection", x)
            if spec["norm"] is not None and spec["norm_first"]:
                x = self.norm(f"{name}.norm", spec["norm"], x)
            if spec["position"] is not None:
                x = x + self.absolute(name, spec["position"], at, len(x))
            if spec["num_token_types"]:
                x = x + self.weights[f"{name}.token_types.weight"][0 if segments is None else segments[at]]
            if spec["norm"] is not None and not spec["norm_first"]:
                x = self.norm(f"{name}.norm", spec["norm"], x)
            if spec["embedding_size"] is not None and spec["projection"] == "end":
                x = self.linear(f"{name}.projection", x)
            rows.append(x)
        return np.stack(rows)

    def absolute(self, name: str, spec: Config, at: int, width: int) -> Array:
        at += spec["offset"]
        if spec["kind"] == "learned":
            return self.weights[f"{name}.positions.weight"][at]
        half = width // 2
        if spec["form"] == "fairseq":
            angles = [at * math.exp(-i * math.log(spec["base"]) / (half - 1)) for i in range(half)]
        else:
            angles = [at / spec["base"] ** (2 * i / width) for i in range(half)]
        sines, cosines = [math.sin(a) for a in angles], [math.cos(a) for a in angles]
        if spec["form"] == "interleaved":
            return np.array([value for pair in zip(sines, cosines, strict=True) for value in pair])
        return np.array(sines + cosines)

    # ------------------------------------------------------------ layers

    def stack(self, name: str, x: Array, source: Array | None = None) -> Array:
        spec = self.config[name]
        layer: Config = {}
        for index in range(spec["num_layers"]):
            letter = spec["layer_pattern"][index % len(spec["layer_pattern"])]
            layer = spec["layer_types"][letter]
            x = self.layer(f"{name}.layers.{index}", f"{name}.relative_bias.{letter}", spec, layer, x, source)
        return self.each(f"{name}.norm", layer["norm"], x) if spec["final_norm"] else x

    def layer(self, at: str, shared: str, stack: Config, spec: Config, x: Array, source: Array | None) -> Array:
        norm_position, residual_scale, norm = stack["norm_position"], stack["residual_scale"], spec["norm"]

        def mix(h: Array) -> Array:
            return self.attention(f"{at}.attention", shared, spec["attention"], norm, h, h)

        def mlp_block(h: Array) -> Array:
            return np.stack([self.mlp(f"{at}.mlp", spec["mlp"], row) for row in h])

        def cross(h: Array) -> Array:
            assert source is not None
            return self.attention(f"{at}.cross_attention", shared, spec["cross_attention"], norm, h, source)

        def normed(name: str, h: Array) -> Array:
            return self.each(f"{at}.{name}", norm, h)

        if norm_position == "parallel":
            once = normed("norm1", x)
            return x + residual_scale * mix(once) + residual_scale * mlp_block(once)
        if norm_position == "parallel_pair":
            return x + residual_scale * mix(normed("norm1", x)) + residual_scale * mlp_block(normed("norm2", x))
        branches = (
            [("norm1", mix)] + ([("norm_cross", cross)] if spec["cross_attention"] else []) + [("norm2", mlp_block)]
        )
        for name, branch in branches:
            if norm_position == "post":
                x = normed(name, x + residual_scale * branch(x))
            elif norm_position == "after":
                x = x + residual_scale * normed(name, branch(x))
            elif norm_position == "sandwich":
                x = x + residual_scale * normed(f"{name}_after", branch(normed(name, x)))
            elif norm_position == "normed":
                inside = normed(name, x)
                x = inside + residual_scale * branch(inside)
            else:
                inside = x if name == "norm1" and not spec["pre_attention_norm"] else normed(name, x)
                x = x + residual_scale * branch(inside)
        return x

    def linear(self, name: str, x: Array) -> Array:
        return self.weights[f"{name}.weight"] @ x + self.weights.get(f"{name}.bias", 0.0)

    def each(self, name: str, spec: Config, x: Array) -> Array:
        return np.stack([self.norm(name, spec, row) for row in x])

    def norm(self, name: str, spec: Config, x: Array, head: int | None = None) -> Array:
        """Normalize x; ``head`` selects one of several heads with separate weights."""
        if spec["kind"] == "layer":
            x = x - sum(x) / len(x)
        x = x / math.sqrt(sum(value * value for value in x) / len(x) + spec["eps"])
        if spec["weight"]:
            weight = self.weights[f"{name}.weight"] + (1.0 if spec["unit_offset"] else 0.0)
            x = x * (weight if head is None else weight[head])
        if spec["bias"]:
            bias = self.weights[f"{name}.bias"]
            x = x + (bias if head is None else bias[head])
        return x

    # ------------------------------------------------------------ attention

    def attention(self, at: str, shared: str, spec: Config, norm: Config, x: Array, source: Array) -> Array:
        """Attend from x [L, E] to source [S, E]; query i of head h takes the softmax over the keys visible to it."""
        heads, position = spec["num_heads"], spec["position"] or {"kind": None}
        if spec["latent"] is not None:
            q, k, v = self.latent_heads(at, spec, norm, x)
        else:
            q, k, v = self.plain_heads(at, spec, norm, x, source)
        dim, kv_heads = q.shape[-1], k.shape[1]
        scale = {"default": 1 / math.sqrt(dim), "none": 1.0}.get(spec["softmax_scale"], spec["softmax_scale"])
        sinks = self.weights.get(f"{at}.sink_logits")
        bias = self.bias(f"{at}.relative_bias", shared, position, heads)
        out = []
        for i in range(len(x)):
            label_scores: list[float] = []
            for h in range(heads):
                kv = h // (heads // kv_heads)
                seen = [j for j in range(len(source)) if is_visible(spec, i, j)]
                logits = []
                for j in seen:
                    logit = scale * float(q[i, h] @ k[j, kv])
                    if spec["logit_softcap"] is not None:
                        logit = spec["logit_softcap"] * math.tanh(logit / spec["logit_softcap"])
                    logits.append(logit + bias(h, i, j))
                top = max(logits + ([] if sinks is None else [sinks[h]]))
                shares = [math.exp(logit - top) for logit in logits]
                total = sum(shares) + (0.0 if sinks is None else math.exp(sinks[h] - top))
                label_scores.extend(
                    sum(residual_scale / total * v[j, kv] for residual_scale, j in zip(shares, seen, strict=True))
                )
            out.append(self.linear(f"{at}.out", np.array(label_scores)))
        return np.stack(out)

    def plain_heads(self, at: str, spec: Config, norm: Config, x: Array, source: Array) -> tuple[Array, Array, Array]:
        """Return q [L, H, D], k [S, K, D] and v [S, K, Dv], rotated."""
        heads, kv_heads = spec["num_heads"], spec["num_kv_heads"] or spec["num_heads"]
        dim = spec["head_dim"] or self.config["hidden_size"] // heads
        value_dim, position = spec["value_dim"] or dim, spec["position"] or {"kind": None}
        q = self.project(f"{at}.q", f"{at}.q_norm", spec, norm, x, heads, dim)
        k = self.project(f"{at}.k", f"{at}.k_norm", spec, norm, source, kv_heads, dim)
        v = self.project(f"{at}.v", None, spec, norm, source, kv_heads, value_dim)
        if position["kind"] == "rope":
            q = np.stack([[rotated(q[i, h], i, position) for h in range(heads)] for i in range(len(q))])
            k = np.stack([[rotated(k[j, h], j, position) for h in range(kv_heads)] for j in range(len(k))])
        return q, k, v

    def latent_heads(self, at: str, spec: Config, norm: Config, x: Array) -> tuple[Array, Array, Array]:
        """Return q, k [L, H, nope + rope] and v [L, H, Dv] as in DeepSeek-V2's equations: a key and value per head."""
        sizes, heads, position = spec["latent"], spec["num_heads"], spec["position"]
        rank, nope = sizes["kv_lora_rank"], sizes["qk_nope_head_dim"]
        norm, q, k, v = sizes["norm"] or norm, [], [], []
        for i, row in enumerate(x):
            if sizes["q_lora_rank"] is None:
                flat_q = self.linear(f"{at}.q", row)
            else:
                flat_q = self.linear(f"{at}.q_up", self.norm(f"{at}.q_norm", norm, self.linear(f"{at}.q_down", row)))
            down = self.linear(f"{at}.kv_down", row)
            key_values = self.linear(f"{at}.kv_up", self.norm(f"{at}.kv_norm", norm, down[:rank])).reshape(heads, -1)
            shared = rotated(down[rank:], i, position)
            queries = flat_q.reshape(heads, -1)
            q.append([np.concatenate((each[:nope], rotated(each[nope:], i, position))) for each in queries])
            k.append([np.concatenate((each[:nope], shared)) for each in key_values])
            v.append(key_values[:, nope:])
        return np.stack(q), np.stack(k), np.stack(v)

    def project(self, at: str, normed: str | None, spec: Config, norm: Config, x: Array, heads: int, dim: int) -> Array:
        flat = np.stack([self.linear(at, row) for row in x])
        flat = flat if spec["clip_qkv"] is None else np.clip(flat, -spec["clip_qkv"], spec["clip_qkv"])
        how = spec["qk_norm"] if normed is not None else "none"
        norm = spec["qk_norm_config"] or norm
        if how == "full":
            flat = self.each(str(normed), norm, flat)
        out = flat.reshape(len(x), heads, dim)
        if how in ("head", "each"):
            which = [h if how == "each" else None for h in range(heads)]
            out = np.stack([[self.norm(str(normed), norm, row[h], which[h]) for h in range(heads)] for row in out])
        return out

    def bias(self, own: str, shared: str, position: Config, heads: int) -> Any:
        """Return a function (head, query position, key position) -> bias of their logit."""
        if position["kind"] == "alibi":
            slopes = alibi_slopes(heads)
            return lambda h, i, j: -position["factor"] * slopes[h] * abs(i - j)
        if position["kind"] == "t5":
            table = self.weights[shared if position["shared"] else own]
            return lambda h, i, j: table[t5_bucket(j - i, position), h]
        return lambda h, i, j: 0.0

    # ------------------------------------------------------------ MLPs

    def mlp(self, at: str, spec: Config, x: Array) -> Array:
        if spec["kind"] == "moe":
            return self.experts(at, spec, x)
        up = self.linear(f"{at}.up", x)
        if spec["kind"] == "gated":
            return self.linear(f"{at}.down", activation(spec["activation"], self.linear(f"{at}.gate", x)) * up)
        return self.linear(f"{at}.down", activation(spec["activation"], up))

    def experts(self, at: str, spec: Config, x: Array) -> Array:
        logits = self.linear(f"{at}.router", x)
        scores = np.exp(logits - max(logits)) / sum(np.exp(logits - max(logits)))
        scores = 1 / (1 + np.exp(-logits)) if spec["router"] == "sigmoid" else scores
        ranking = scores + self.weights[f"{at}.selection_bias"] if spec["selection_bias"] else scores
        size = spec["num_experts"] // spec["num_groups"]
        groups = [sorted(ranking[low : low + size])[::-1] for low in range(0, spec["num_experts"], size)]
        values = [sum(group[: 2 if spec["selection_bias"] else 1]) for group in groups]
        allowed = sorted(range(spec["num_groups"]), key=lambda g: -values[g])[: spec["num_groups_per_token"]]
        ranked = sorted(range(spec["num_experts"]), key=lambda e: -ranking[e])
        best = [e for e in ranked if e // size in allowed][: spec["num_experts_per_token"]]
        shares = scores[best] / (sum(scores[best]) if spec["renormalize"] else 1.0) * spec["routed_scale"]
        out = np.zeros_like(x)
        if spec["shared_size"] is not None:
            shared = {"kind": "gated", "activation": spec["activation"]}
            gate = 1 / (1 + np.exp(-self.linear(f"{at}.shared_gate", x))) if spec["shared_gate"] else 1.0
            out = gate * self.mlp(f"{at}.shared", shared, x)
        for residual_scale, e in zip(shares, best, strict=True):
            gate, up = (
                self.weights[f"{at}.{part}"][e] @ x + (self.weights[f"{at}.{part}_bias"][e] if spec["bias"] else 0.0)
                for part in ("gate", "up")
            )
            if spec["swiglu_limit"] is not None:
                gate, up = (
                    np.minimum(gate, spec["swiglu_limit"]),
                    np.clip(up, -spec["swiglu_limit"], spec["swiglu_limit"]),
                )
            if spec["swiglu_alpha"] is not None:
                inner = (up + 1) * gate / (1 + np.exp(-spec["swiglu_alpha"] * gate))
            else:
                inner = activation(spec["activation"], gate) * up
            label_scores = self.weights[f"{at}.down"][e] @ inner + (
                self.weights[f"{at}.down_bias"][e] if spec["bias"] else 0.0
            )
            out = out + residual_scale * label_scores
        return out


def is_visible(spec: Config, i: int, j: int) -> bool:
    """True if the query at position i may see the key at position j. A window includes the query itself."""
    if spec["causal"]:
        return j <= i and (spec["window"] is None or i - j < spec["window"])
    return spec["window"] is None or abs(i - j) < spec["window"]


def rotated(x: Array, at: int, spec: Config) -> Array:
    """Rotate pair i of the first ``fraction`` of x by at * theta^(-2i/D) (Su et al. 2021)."""
    size = int(len(x) * spec["partial_rotary_factor"])
    half, out = size // 2, x.copy()
    factor = 1.0 if spec["scaling"] is None else spec["scaling"]["factor"]
    assert spec["scaling"] is None or spec["scaling"]["kind"] == "linear"
    for i in range(half):
        angle = at / (factor * spec["theta"] ** (2 * i / size))
        cos, sin = math.cos(angle), math.sin(angle)
        a, b = (2 * i, 2 * i + 1) if spec["interleaved"] else (i, i + half)
        out[a], out[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
    return out


def alibi_slopes(heads: int) -> list[float]:
    """Return 2^(-8/n), 2^(-16/n), ... for a power of two, else the slopes of the power below, then every other slope
    of the power above (reference code of Press et al. 2021).
    """
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (h + 1) / heads) for h in range(heads)]
    below = 1 << (heads.bit_length() - 1)
    return alibi_slopes(below) + alibi_slopes(2 * below)[0::2][: heads - below]


def t5_bucket(ahead: int, spec: Config) -> int:
    """Return the bucket of one distance k - q, as in the reference code of Raffel et al. 2020."""
    count, first, distance = spec["num_buckets"], 0, -ahead
    if spec["bidirectional"]:
        count //= 2
        first, distance = (count, ahead) if ahead > 0 else (0, -ahead)
    distance = max(distance, 0)
    exact = count // 2
    if distance < exact:
        return first + distance
    grown = math.log(distance / exact) / math.log(spec["max_distance"] / exact) * (count - exact)
    return first + min(count - 1, exact + int(grown))


def activation(name: str, x: Array) -> Array:
    if name == "relu":
        return np.maximum(x, 0.0)
    if name == "relu2":
        return np.maximum(x, 0.0) ** 2
    if name == "tanh":
        return np.tanh(x)
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "quick_gelu":
        return x / (1 + np.exp(-1.702 * x))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert name == "gelu", name
    return 0.5 * x * (1 + np.array([math.erf(value / math.sqrt(2)) for value in x]))

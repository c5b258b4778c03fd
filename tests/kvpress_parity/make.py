"""Write golden_files/kvpress.json: the tokens that kvpress retains.

Run it where kvpress is installed; it imports nothing of kvad.

    pip install kvpress==0.5.5;  python tests/kvpress_parity/make.py

Each press compresses values that encode the index of their token.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import kvpress
import tensors
import torch

RATIOS = (0.5, 0.75)
SEEDS = (1, 2, 3)
PRESSES = {
    "snapkv": lambda ratio: kvpress.SnapKVPress(ratio, window_size=6, kernel_size=5),
    "tova": kvpress.TOVAPress,
    "observed": kvpress.ObservedAttentionPress,
    "key-norm": kvpress.KnormPress,
    "streaming": lambda ratio: kvpress.StreamingLLMPress(ratio, n_sink=4),
}


def retained(press: object, seed: int) -> list[list[int]]:
    config = SimpleNamespace(num_attention_heads=tensors.HEADS, num_key_value_heads=tensors.KV_HEADS)
    module = SimpleNamespace(config=config, head_dim=tensors.DIM)
    keys = tensors.keys(seed)
    values = torch.arange(tensors.TOKENS).view(1, 1, -1, 1).expand(keys.shape)
    hidden = torch.zeros(1, tensors.TOKENS, 1)
    _, left = press.compress(module, hidden, keys, values, tensors.attention(seed), {})  # type: ignore[attr-defined]
    return [sorted(head.tolist()) for head in left[0, :, :, 0]]


values_of_tokens = {
    f"{name}/{ratio}/{seed}": retained(press(ratio), seed)
    for name, press in PRESSES.items()
    for ratio in RATIOS
    for seed in SEEDS
}
text = ",\n".join(f"  {json.dumps(name)}: {json.dumps(heads)}" for name, heads in values_of_tokens.items())
(Path(__file__).parents[1] / "golden_files" / "kvpress.json").write_text("{\n" + text + "\n}\n", encoding="utf-8")

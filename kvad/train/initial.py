"""How what has an encoder begins: matrices by Glorot & Bengio (2010), tables normal(0, width^-1/2), as tensor2tensor.

``Transformer`` itself begins as GPT-2 does, with 0.02 for all: made for layers normalised before each part.  Those of
the original Transformer are normalised afterwards, and learn hardly anything from there: reversing strings of 2 to 6
letters, 1 + 1 layers, 32 wide, validation loss after 400 steps (lr 1e-2): 1.03 from 0.02, 0.01 from here.  A table with
this deviation, times sqrt(width), gives vectors with elements of about 1, which is also the size of the positions'.
Where logits are scaled down, the table is as much larger: normal(0, 1) in T5.  Where attention divides by nothing, the
queries' matrix is divided by sqrt(head_dim), as T5's is (Raffel et al.'s code); and T5's matrices of width x width are
Glorot's.
"""

from __future__ import annotations

from torch import nn

from kvad.config import LanguageHeadConfig
from kvad.model.mixers import Attention
from kvad.model.transformer import Transformer

__all__ = ["init_weights"]

EMBEDDING_TABLES = ("tokens.weight", "positions.weight", "token_types.weight", "head.weight")


def init_weights(model: Transformer) -> None:
    """In the order of the parameters, from torch's random numbers; biases, norms and positions' logits stay."""
    head = model.config.head
    table = model.config.hidden_size**-0.5 / (head.logit_scale if isinstance(head, LanguageHeadConfig) else 1.0)
    for name, parameter in model.named_parameters():
        if name.endswith(EMBEDDING_TABLES):
            nn.init.normal_(parameter, std=table)
        elif parameter.dim() == 2 and name.endswith(".weight") and "norm" not in name:
            nn.init.xavier_uniform_(parameter)
    for module in model.modules():
        if isinstance(module, Attention) and module.spec.softmax_scale == "none":
            module.q.weight.data.mul_(module.head_dim**-0.5)

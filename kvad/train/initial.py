"""How an encoder-decoder begins: matrices by Glorot & Bengio (2010), tables normal(0, width^-1/2), as tensor2tensor.

``Transformer`` itself begins as GPT-2 does, with 0.02 for all: made for layers normalised before each part.  Those of
the original Transformer are normalised afterwards, and learn hardly anything from there: reversing strings of 2 to 6
letters, 1 + 1 layers, 32 wide, validation loss after 400 steps (lr 1e-2): 1.03 from 0.02, 0.01 from here.  A table with
this deviation, times sqrt(width), gives vectors with elements of about 1, which is also the size of the positions'.
"""

from __future__ import annotations

from torch import nn

from kvad.model.transformer import Transformer

__all__ = ["initialise"]

TABLES = ("tokens.weight", "positions.weight", "segments.weight", "head.weight")


def initialise(model: Transformer) -> None:
    """In the order of the parameters, from torch's random numbers; biases, norms and positions' logits stay."""
    for name, parameter in model.named_parameters():
        if name.endswith(TABLES):
            nn.init.normal_(parameter, std=model.config.width**-0.5)
        elif parameter.dim() == 2 and name.endswith(".weight") and "norm" not in name:
            nn.init.xavier_uniform_(parameter)

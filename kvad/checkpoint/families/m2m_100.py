"""M2M-100 (Fan et al. 2020) and NLLB (Costa-jussa et al. 2022).

Translation between 100 and 200 languages.  Norms before each half, ReLU, sinusoidal positions with tensor2tensor's
frequencies, counted from the padding id + 1 (2); the table is in no file.  Scaled embeddings, no bias in the head.
"""

from __future__ import annotations

from kvad.checkpoint.families._bart import BartFamily
from kvad.config import SinusoidalPositionsConfig

FAMILY = BartFamily(
    "m2m_100",
    "M2M100ForConditionalGeneration",
    lambda fields, max_seq_len: SinusoidalPositionsConfig(
        form="fairseq", offset=fields.integer("pad_token_id", default=1) + 1
    ),
    pre_norm=True,
    head_bias=False,
    activation="relu",
    scale_embedding=True,
).family()

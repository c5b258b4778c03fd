"""Model configuration as frozen dataclasses; parameter shapes and FLOPs computed from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.config import flops as flops
    from kvad.config import parameter_shapes as parameter_shapes
    from kvad.config import plugins as plugins
    from kvad.config import serialization as serialization
    from kvad.config.layers import AlibiConfig as AlibiConfig
    from kvad.config.layers import AttentionConfig as AttentionConfig
    from kvad.config.layers import ClassificationHeadConfig as ClassificationHeadConfig
    from kvad.config.layers import CustomPositionsConfig as CustomPositionsConfig
    from kvad.config.layers import DisentangledConfig as DisentangledConfig
    from kvad.config.layers import DropoutConfig as DropoutConfig
    from kvad.config.layers import DynamicScalingConfig as DynamicScalingConfig
    from kvad.config.layers import EmbeddingConfig as EmbeddingConfig
    from kvad.config.layers import GatedMLPConfig as GatedMLPConfig
    from kvad.config.layers import HeadTransformConfig as HeadTransformConfig
    from kvad.config.layers import LanguageHeadConfig as LanguageHeadConfig
    from kvad.config.layers import LatentConfig as LatentConfig
    from kvad.config.layers import LayerConfig as LayerConfig
    from kvad.config.layers import LearnedPositionsConfig as LearnedPositionsConfig
    from kvad.config.layers import LinearScalingConfig as LinearScalingConfig
    from kvad.config.layers import Llama3ScalingConfig as Llama3ScalingConfig
    from kvad.config.layers import LongRopeScalingConfig as LongRopeScalingConfig
    from kvad.config.layers import MoEConfig as MoEConfig
    from kvad.config.layers import NormConfig as NormConfig
    from kvad.config.layers import PlainMLPConfig as PlainMLPConfig
    from kvad.config.layers import Pooling as Pooling
    from kvad.config.layers import PoolingHeadConfig as PoolingHeadConfig
    from kvad.config.layers import ProportionalScalingConfig as ProportionalScalingConfig
    from kvad.config.layers import QueryScalingConfig as QueryScalingConfig
    from kvad.config.layers import RopeConfig as RopeConfig
    from kvad.config.layers import RopeScalingConfig as RopeScalingConfig
    from kvad.config.layers import SinusoidalPositionsConfig as SinusoidalPositionsConfig
    from kvad.config.layers import StackConfig as StackConfig
    from kvad.config.layers import T5BiasConfig as T5BiasConfig
    from kvad.config.layers import TokenMixer as TokenMixer
    from kvad.config.layers import YarnScalingConfig as YarnScalingConfig
    from kvad.config.model import AttentionSpec as AttentionSpec
    from kvad.config.model import EncoderInputConfig as EncoderInputConfig
    from kvad.config.model import ModelConfig as ModelConfig
    from kvad.config.model import attention_dims as attention_dims
    from kvad.config.model import attention_specs as attention_specs
    from kvad.config.model import canonical_config as canonical_config
    from kvad.config.model import embedding_size as embedding_size
    from kvad.config.model import encoder_attention_specs as encoder_attention_specs
    from kvad.config.model import encoder_hidden_size as encoder_hidden_size
    from kvad.config.model import head_dim as head_dim
    from kvad.config.model import head_input_size as head_input_size
    from kvad.config.model import kv_size as kv_size
    from kvad.config.model import query_dim as query_dim
    from kvad.config.model import rotary_dim as rotary_dim
    from kvad.config.parameter_shapes import DTYPE_BYTES as DTYPE_BYTES
    from kvad.config.plugins import register as register
    from kvad.config.recurrent import Activation as Activation
    from kvad.config.recurrent import GatedDeltaConfig as GatedDeltaConfig
    from kvad.config.recurrent import GatedRecurrenceConfig as GatedRecurrenceConfig
    from kvad.config.recurrent import RecurrentMixer as RecurrentMixer
    from kvad.config.recurrent import ShortConvConfig as ShortConvConfig
    from kvad.config.serialization import Fraction as Fraction
    from kvad.config.serialization import NonNegativeFloat as NonNegativeFloat
    from kvad.config.serialization import NonNegativeInt as NonNegativeInt
    from kvad.config.serialization import OpenFraction as OpenFraction
    from kvad.config.serialization import PositiveFloat as PositiveFloat
    from kvad.config.serialization import PositiveInt as PositiveInt
    from kvad.config.serialization import Range as Range
    from kvad.config.serialization import check_fields as check_fields
    from kvad.config.serialization import is_later_default as is_later_default

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

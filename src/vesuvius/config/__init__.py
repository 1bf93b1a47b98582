"""The experiment: one YAML file becomes one frozen `Config`.  Every other module takes its own section of it.

In: a YAML file, those it extends, overrides.  Out: `Config`, or a `ConfigError` that names each problem's line.  Each
field carries one line with its meaning and unit; docs/config.md is made from them (`tools/config_table.py`).  `load.py`
reads files and overrides.
"""

from vesuvius.config.data import (
    ArrayConfig,
    AugmentConfig,
    DataConfig,
    ForegroundConfig,
    NormalizeConfig,
    StoreConfig,
    ValidationConfig,
    VolumeConfig,
)
from vesuvius.config.diffusion import DiffusionConfig, Prediction, SamplerMethod
from vesuvius.config.experiment import ClusterConfig, Config, MonitorConfig
from vesuvius.config.model import ModelConfig
from vesuvius.config.section import NonNegativeInt, PositiveInt, Section, SizeZYX, Triple
from vesuvius.config.training import TrainingConfig

__all__ = [
    "ArrayConfig",
    "AugmentConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "DiffusionConfig",
    "ForegroundConfig",
    "ModelConfig",
    "MonitorConfig",
    "NonNegativeInt",
    "NormalizeConfig",
    "PositiveInt",
    "Prediction",
    "SamplerMethod",
    "Section",
    "SizeZYX",
    "StoreConfig",
    "TrainingConfig",
    "Triple",
    "ValidationConfig",
    "VolumeConfig",
]

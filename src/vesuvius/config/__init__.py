"""The experiment: one YAML file becomes one frozen `Config`.  Every other module takes its own section of it.

Each field carries one line that says what it means, its unit and what follows from it; README's table of keys is made
from these lines (`tools/config_table.py`).  Reading files and overrides is in `config_file.py`.
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

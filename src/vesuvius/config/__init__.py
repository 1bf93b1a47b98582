"""The experiment: one YAML file becomes one frozen `Config`.  Other modules take their own section of it.

In: a YAML file, those it extends, overrides.  Out: `Config`, or a `ConfigError` with the line of each problem.  The
fields' descriptions are in docs/config.md (`tools/config_table.py`).  `load.py` reads files and overrides.
"""

from vesuvius.config.data import ArrayConfig as ArrayConfig
from vesuvius.config.data import AugmentConfig as AugmentConfig
from vesuvius.config.data import ClassWeight as ClassWeight
from vesuvius.config.data import ConditionConfig as ConditionConfig
from vesuvius.config.data import DataConfig as DataConfig
from vesuvius.config.data import ForegroundConfig as ForegroundConfig
from vesuvius.config.data import MaskConfig as MaskConfig
from vesuvius.config.data import NormalizeConfig as NormalizeConfig
from vesuvius.config.data import StoreConfig as StoreConfig
from vesuvius.config.data import ValidationConfig as ValidationConfig
from vesuvius.config.data import VolumeConfig as VolumeConfig
from vesuvius.config.experiment import ClusterConfig as ClusterConfig
from vesuvius.config.experiment import Config as Config
from vesuvius.config.section import Triple as Triple
from vesuvius.config.training import DiffusionConfig as DiffusionConfig
from vesuvius.config.training import ModelConfig as ModelConfig
from vesuvius.config.training import NoiseEmbedding as NoiseEmbedding
from vesuvius.config.training import Prediction as Prediction
from vesuvius.config.training import SamplerMethod as SamplerMethod
from vesuvius.config.training import TrainingConfig as TrainingConfig

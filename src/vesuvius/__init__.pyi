from vesuvius.config import ArrayConfig as ArrayConfig
from vesuvius.config import DataConfig as DataConfig
from vesuvius.config import MaskConfig as MaskConfig
from vesuvius.config import StoreConfig as StoreConfig
from vesuvius.config import VolumeConfig as VolumeConfig
from vesuvius.errors import ConfigError as ConfigError
from vesuvius.errors import DataError as DataError
from vesuvius.errors import VesuviusError as VesuviusError
from vesuvius.loader.device import PatchBatch as PatchBatch
from vesuvius.loader.patch_loader import PatchLoader as PatchLoader
from vesuvius.predict.grid import Aggregator as Aggregator
from vesuvius.predict.grid import GridBatch as GridBatch
from vesuvius.predict.grid import GridLoader as GridLoader
from vesuvius.predict.run import Prediction as Prediction
from vesuvius.predict.run import predict_volume as predict_volume
from vesuvius.stream.options import StreamOptions as StreamOptions
from vesuvius.stream.start.prepare import prepare_data as prepare_data
from vesuvius.stream.stream import PatchStream as PatchStream
from vesuvius.volumes.volume import Volume as Volume
from vesuvius.volumes.volume import open_volume as open_volume

__version__: str
__all__: list[str]

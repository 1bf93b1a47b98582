"""What the tests of the config share: a smallest file, and what its reader makes of a text."""

from collections.abc import Iterator

from pydantic import BaseModel

from vesuvius.config import Config
from vesuvius.config.load import parse_config
from vesuvius.errors import ConfigError

MINIMAL = "name: tiny\ndata:\n  volumes:\n    - path: scroll.zarr\n"  # 4 lines: what a test appends starts on line 5


def read(text: str, *overrides: str) -> Config:
    """The config of a text that is called x.yaml."""
    return parse_config(text, overrides, source="x.yaml")


def problems(text: str, *overrides: str) -> list[str]:
    """The lines of the error's message; none where the text is right."""
    try:
        read(text, *overrides)
    except ConfigError as error:
        return str(error).split("\n")
    return []


def sections(section: type[BaseModel] = Config) -> Iterator[type[BaseModel]]:
    """All models of the config, found by way of the fields' types rather than by the code under test."""
    yield section
    for info in section.model_fields.values():
        for found in (info.annotation, *getattr(info.annotation, "__args__", ())):
            if isinstance(found, type) and issubclass(found, BaseModel):
                yield from sections(found)

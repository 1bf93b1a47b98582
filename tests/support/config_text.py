"""Helpers of config tests: a minimal file, and parsing of a text."""

from collections.abc import Iterator

from pydantic import BaseModel

from vesuvius.config import Config
from vesuvius.config.load import parse_config
from vesuvius.errors import ConfigError

MINIMAL = "name: tiny\ndata:\n  volumes:\n    - path: scroll.zarr\n"  # 4 lines: what a test appends starts on line 5


def read(text: str, *overrides: str) -> Config:
    """Config of a text named x.yaml."""
    return parse_config(text, overrides, source="x.yaml")


def problems(text: str, *overrides: str) -> list[str]:
    """Lines of the error message; empty if the text is valid."""
    try:
        read(text, *overrides)
    except ConfigError as error:
        return str(error).split("\n")
    return []


def sections(section: type[BaseModel] = Config) -> Iterator[type[BaseModel]]:
    """All models of the config, found through field types instead of the code under test."""
    yield section
    for info in section.model_fields.values():
        for found in (info.annotation, *getattr(info.annotation, "__args__", ())):
            if isinstance(found, type) and issubclass(found, BaseModel):
                yield from sections(found)

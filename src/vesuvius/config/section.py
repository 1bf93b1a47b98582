"""Base class of all config sections, and the types of their fields."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any, Self
from urllib.parse import unquote

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from vesuvius.errors import ConfigError

Triple = tuple[int, int, int]


def _check_positive(sizes: Triple) -> Triple:
    if min(sizes) < 1:
        raise ValueError(f"sizes {list(sizes)} (z, y, x) must all be at least 1")
    return sizes


def expand_path(path: str) -> str:
    """Expand `~`, and turn a file:// address into a path (`#` and `?` are ordinary characters)."""
    if path.startswith("file://"):
        return unquote("/" + path.removeprefix("file://").partition("/")[2])
    return os.path.expanduser(path)  # pathlib raises for an unknown ~name


PathText = Annotated[str, AfterValidator(expand_path)]
SizeZYX = Annotated[Triple, AfterValidator(_check_positive)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent type conversion.

    Raises:
        ConfigError: constructed in Python with a wrong value (`model_validate` raises pydantic's own error).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            found = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            found = (text.replace("Value error, ", "").removeprefix(": ") for text in found)
            raise ConfigError(f"{type(self).__name__} is not valid: {'; '.join(found)}") from None

    # As pydantic marks its own: nested sections bypass it, which keeps the path to a wrong value.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if (problem := next(self.contradictions(), None)) is not None:
            raise ValueError(problem)
        return self

    def contradictions(self) -> Iterator[str]:
        """Yield a message for each rule between keys that the values break.  Pure."""
        return iter(())

"""Base class of all config sections, and the types of their fields."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.functional_serializers import PlainSerializer
from pydantic.functional_validators import WrapValidator

from vesuvius.errors import ConfigError, without_file_scheme

Triple = tuple[int, int, int]


class Location(str):
    """An absolute path, or an address, that remembers how it was `written`: configs are dumped as written.

    Expands `~`, turns a file:// address into a path, and joins a relative path to the current working directory.
    Raises ValueError: the text is empty, or that directory no longer exists.
    """

    written: str

    def __new__(cls, text: str) -> Self:
        if not text:
            raise ValueError("the path is empty (an unset variable?); write `.` for the working directory")
        text = os.path.expanduser(without_file_scheme(text))  # pathlib raises for an unknown ~name
        try:
            path = super().__new__(cls, text if "://" in text or os.path.isabs(text) else str(Path(text).absolute()))
        except FileNotFoundError:
            raise ValueError(f"{text!r} starts in a working directory that is gone; use a full path") from None
        path.written = text
        return path


def _locate(given: Any, as_text: Callable[[Any], str]) -> Location:
    return given if isinstance(given, Location) else Location(as_text(given))


PathText = Annotated[
    str, WrapValidator(_locate), PlainSerializer(lambda path: getattr(path, "written", path), when_used="json")
]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
SizeZYX = tuple[PositiveInt, PositiveInt, PositiveInt]
NonNegativeInt = Annotated[int, Field(ge=0)]


def natural(value: Any) -> Any:
    """Convert what Python users have to the types of fields, within dicts and sequences too."""
    if isinstance(value, dict):
        return {key: natural(each) for key, each in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy's and torch's; neither is imported here
        value = value.tolist()
    short = isinstance(value, range) and len(value) <= 2**16  # as a tuple a wrong one could take all memory
    return tuple(map(natural, value)) if short or isinstance(value, (list, tuple)) else value


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent type conversion.

    The text below a field is its description.  In Python, lists, `os.PathLike` and the numbers and arrays of numpy or
    torch stand for tuples, text and numbers.

    Raises:
        ConfigError: constructed in Python with a wrong value (`model_validate` raises pydantic's own error).
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**natural(fields))
        except ValidationError as error:
            errors = error.errors()
            # An item that is not valid makes its list too short.
            errors = [each for each in errors if each["type"] != "too_short"] or errors
            found = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in errors)
            found = (text.replace("Value error, ", "").removeprefix(": ") for text in found)
            raise ConfigError(f"{type(self).__name__} is not valid: {'; '.join(found)}") from None

    # As pydantic marks its own: nested sections bypass it, which keeps the path to a wrong value.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were set, by name, to make a changed one that is validated."""
        return {name: getattr(self, name) for name in self.model_fields_set}

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if (problem := next(self.contradictions(), None)) is not None:
            raise ValueError(problem)
        return self

    def contradictions(self) -> Iterator[str]:
        """Yield a message for each rule between keys that the values break.  Pure."""
        return iter(())

"""What all sections of the config share: strictness, and the types of their fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Triple = tuple[int, int, int]


def _check_positive(sizes: Triple) -> Triple:
    if min(sizes) < 1:
        raise ValueError("each of the three sizes (z, y, x) must be at least 1")
    return sizes


SizeZYX = Annotated[Triple, AfterValidator(_check_positive)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

"""What all tables of settings have in common: their kinds of numbers, how strict they are, and the errors about them."""

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class ConfigError(ValueError):
    """The settings of a run cannot be used; the message is one sentence that says why and what to do."""


class UsageError(ValueError):
    """What was asked for cannot work; the message is one sentence that says why and what to do."""


class Settings(BaseModel):
    """One table of settings: an unknown key, a value of another type, NaN and infinity are errors; never changed."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def folder_name(name: str) -> str:
    """Give a name back that can be that of a folder.

    Raises:
        ValueError: it cannot.
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError("should be letters, digits, and `_`, `.` or `-` after the first")
    return name

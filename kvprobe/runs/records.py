"""How results are written as strict JSON and read again."""

from __future__ import annotations

from typing import Annotated

from pydantic import PlainSerializer, PlainValidator

from kvprobe.stats import Effect

StoredEffect = Annotated[
    Effect,
    PlainSerializer(Effect.to_record),
    PlainValidator(lambda value: value if isinstance(value, Effect) else Effect.from_record(value)),
]
"""An effect as a field of a record."""

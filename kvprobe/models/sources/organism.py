"""Organisms: small models that ship with kvprobe."""

from __future__ import annotations

from typing_extensions import override

from kvprobe.errors import ModelSourceError
from kvprobe.models.config import ModelConfig
from kvprobe.models.sources.base import MODEL_SOURCES, Pins
from kvprobe.models.sources.directory import DirectorySource, read_json

CARD = "card.json"


@MODEL_SOURCES.register("organism")
class OrganismSource(DirectorySource):
    """A folder with a card; weights, stored in float16, and settings are pinned by the card; it is used in float32."""

    mend = "reinstall kvprobe, or train it again with `kvprobe organisms train`"

    @override
    def pins(self, config: ModelConfig) -> Pins:
        assert config.path is not None
        card = read_json(config.path / CARD)
        pinned = config.sha256 or card.get("weights_sha256") or card.get("sha256")
        if not isinstance(pinned, str):
            raise ModelSourceError(f"{config.path / CARD} does not pin its weights; add the key 'weights_sha256'.")
        settings = config.settings_sha256 or card.get("settings_sha256")
        return Pins(pinned, None if settings is None else str(settings))

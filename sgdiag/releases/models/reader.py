"""Reads a model's ``config.json`` with care: every number is checked, what is left out is filled in as SGLang does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgdiag.model.errors import SgdiagError

MAX_LAYERS = 10_000
MAX_NUMBER = 10**9

_DELTA_NET_DEFAULTS = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
CLASS_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
    "gemma4_text": {"head_dim": 256, "global_head_dim": 512, "max_position_embeddings": 131072},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
    "qwen3": {"head_dim": 128},
    "qwen3_next": _DELTA_NET_DEFAULTS,
    "qwen3_5": _DELTA_NET_DEFAULTS,
    "qwen3_5_text": _DELTA_NET_DEFAULTS,
    "qwen3_5_moe": _DELTA_NET_DEFAULTS,
    "qwen3_5_moe_text": _DELTA_NET_DEFAULTS,
}
"""What transformers and SGLang fill in where a checkpoint's ``config.json`` leaves it out, by ``model_type``."""


class ConfigError(SgdiagError):
    """A ``config.json`` that does not say what is needed, or says nonsense; one line."""


class ConfigReader:
    """Reads ``config`` (a JSON object) with the defaults of its model type; wrong values raise ConfigError."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._defaults = CLASS_DEFAULTS.get(str(config.get("model_type")), {})

    def get(self, key: str) -> Any:
        value = self._config.get(key)
        return self._defaults.get(key) if value is None else value

    def find(self, key: str, most: int = MAX_NUMBER) -> int | None:
        """A whole number from 0 to ``most``; None where there is none."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise ConfigError(f"config.json: {key} is {str(value)[:40]!r}, not a number that can be meant")
        return value

    def number(self, key: str, most: int = MAX_NUMBER) -> int:
        """The same, at least 1, and it must be there."""
        value = self.find(key, most)
        if value is None:
            raise ConfigError(f"config.json does not give {key}")
        if value < 1:
            raise ConfigError(f"config.json: {key} is {value}")
        return value

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or len(value) > MAX_LAYERS:
            raise ConfigError(f"config.json does not give {key} as a list of layers")
        return [str(entry) for entry in value]

    def changed(self, **values: Any) -> ConfigReader:
        return ConfigReader({**self._config, **values})

    def section(self, key: str) -> ConfigReader | None:
        value = self._config.get(key)
        return ConfigReader(value) if isinstance(value, Mapping) else None

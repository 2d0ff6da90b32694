"""Reading a network's config.json: known fields become a dataclass, unknown ones must be inactive."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self


class ConfigError(ValueError):
    """A config.json asks for something that this network does not do."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Base of the networks' configs.

    A subclass lists the fields that it honours; `FIXED` the fields that change the output but are only
    supported at one value, with that value; every other field of the file has no bearing on inference.
    """

    FIXED: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str) -> Self:
        """Builds the config from a parsed config.json; `where` names the file in errors.

        Raises:
          ConfigError: a required field is missing, or an option is set that is not supported.
        """
        fields = {f.name: f for f in dataclasses.fields(cls)}
        missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and values.get(n) is None]
        if missing:
            raise ConfigError(f"{where}: no value for {', '.join(missing)}")
        for name, supported in cls.FIXED.items():
            if name in values and _frozen(values[name]) not in (supported, None):
                raise ConfigError(f"{where}: {name}={values[name]!r} is not supported, only {supported!r}")
        known = {n: _frozen(values[n]) for n in fields if values.get(n) is not None}
        try:
            config = cls(**known)
            config.check()
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        return config

    def check(self) -> None:
        """Raises ConfigError if the fields do not fit together."""

    def require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(f"{name}={getattr(self, name)!r} is not supported, only {expected}")


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value

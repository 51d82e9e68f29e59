"""Every knob, one place: `KVSWEEP_*` environment variables or a TOML file."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource


class ConfigError(ValueError):
    """A knob has a value kvsweep does not accept; the message names the knob, the value and what is accepted."""


class Intensity(str, Enum):
    """The one number for the common case; sets host and device duty unless those are given."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


# Share of one core with the GIL, share of the device, for each intensity.
DUTIES = {Intensity.LOW: (0.005, 0.01), Intensity.NORMAL: (0.02, 0.05), Intensity.HIGH: (0.10, 0.25)}

Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class Settings(BaseSettings):
    """Read in this order: keyword arguments, `KVSWEEP_*` environment, the TOML file that `KVSWEEP_CONFIG` names."""

    model_config = SettingsConfigDict(env_prefix="KVSWEEP_", extra="forbid", frozen=True)

    # How hard it works
    intensity: Intensity = Field(Intensity.NORMAL, description="low, normal or high: how hard the sweep works")
    host_duty: Share | None = Field(None, description="share of one core's time the sweeper's Python may use")
    device_duty: Share | None = Field(None, description="share of time a verify launch may be under way")
    device_bytes_per_second: float | None = Field(None, gt=0, description="upper bound on bytes verified a second")
    cycle_target: Seconds = Field(60.0, description="seconds in which every resident slot should be verified once")
    slice_us: float = Field(100.0, ge=10, le=10_000, description="longest the gate is held at a time, microseconds")
    chunk_slots: int = Field(8192, ge=1, le=1 << 24, description="slots of one plan and launch")

    # What it does
    every_steps: int | None = Field(
        None, ge=0, description="deep pass every N forward steps instead of by time (first at once, 0 = off)"
    )
    light_interval: float = Field(10.0, ge=0, description="seconds between light passes (0 = off)")
    stamps: bool = Field(True, description="verify the engine's stamps where it writes them")
    fingerprints: bool = Field(True, description="keep and verify kvsweep's own fingerprints")
    per_segment: bool = Field(False, description="a fingerprint a layer and half, so that findings name it (8 B each)")
    selftest_every: int = Field(10, ge=0, description="deep passes between self-tests (0: at start only)")
    hang_seconds: Seconds = Field(60.0, description="a stage that takes longer has hung, and the sweeper stops itself")
    sm_budget: int = Field(8, ge=0, description="SMs a verify launch may occupy on a GPU (0 = all)")
    green_sms: int | None = Field(None, ge=1, description="confine the sweep to this many SMs by a green context")
    finite: bool = Field(False, description="also report rows of floats that hold an Inf or a NaN (GPU only)")
    unlocked_only: bool = Field(False, description="skip nodes that a running request locks")

    # What it says
    findings_path: Path | None = Field(None, description="JSON-lines log of confirmed findings (none: memory only)")
    findings_max_bytes: int = Field(10_000_000, ge=10_000, description="size at which the findings log is rotated")
    findings_backups: int = Field(3, ge=0, le=100, description="rotated findings logs to keep")
    findings_per_minute: int = Field(60, ge=1, description="findings written a minute; more are counted as suppressed")
    on_violation: str = Field("log", description="log, exit, or an import path package.module:callable")

    # Where it listens
    http: bool = Field(True, description="serve /metrics, /status and the status page")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(9464, ge=0, le=65535, description="port to listen on (0: any free one)")
    token: str | None = Field(None, min_length=8, description="bearer token for control requests (none: loopback only)")

    @field_validator("on_violation")
    @classmethod
    def _known_action(cls, value: str) -> str:
        module, colon, name = value.partition(":")
        if value not in ("log", "exit") and not (module and colon and name):
            raise ValueError("expected log, exit, or an import path package.module:callable")
        return value

    @model_validator(mode="after")
    def _something_to_verify(self) -> Settings:
        if not (self.stamps or self.fingerprints):
            raise ValueError("stamps and fingerprints are both off: nothing would be verified")
        return self

    @property
    def duties(self) -> tuple[float, float]:
        """(host duty, device duty) in force."""
        host, device = DUTIES[self.intensity]
        return self.host_duty or host, self.device_duty or device

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = os.environ.get("KVSWEEP_CONFIG")
        toml = (TomlConfigSettingsSource(settings_cls, Path(path)),) if path else ()
        return (init_settings, env_settings, *toml)


def load_settings(**overrides: Any) -> Settings:
    """Settings from overrides (None = not given), environment and file.

    Raises:
        ConfigError: one line that names the knob, the value found and what is accepted.
    """
    path = os.environ.get("KVSWEEP_CONFIG")
    if path and not Path(path).is_file():
        raise ConfigError(f"KVSWEEP_CONFIG={path}: no such file; expected a TOML file of settings")
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(line) for line in error.errors())) from None
    except (ValueError, OSError) as error:  # TOML that does not parse, a file that cannot be read
        raise ConfigError(f"KVSWEEP_CONFIG={path}: {error}") from None


def _explain(error: Any) -> str:
    knob = ".".join(str(part) for part in error["loc"]) or "settings"
    if error["type"] == "extra_forbidden":
        return f"{knob}: no such setting; the settings are {', '.join(sorted(Settings.model_fields))}"
    description = Settings.model_fields[knob].description if knob in Settings.model_fields else ""
    given = f" (given {error['input']!r})" if knob in Settings.model_fields else ""
    return f"{knob}: {error['msg'].removeprefix('Value error, ')}{given}" + (f": {description}" if description else "")

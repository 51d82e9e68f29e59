"""Settings: where they come from, what wins, and that a bad one is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvsweep.config import DUTIES, ConfigError, Intensity, Settings, load_settings


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVSWEEP_")]:
        monkeypatch.delenv(name)


def test_arguments_beat_environment_beats_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Issue 2: one documented order, and None means not given."""
    file = tmp_path / "kvsweep.toml"
    file.write_text("slice_us = 50.0\ncycle_target = 30\nper_segment = true\n")
    monkeypatch.setenv("KVSWEEP_CONFIG", str(file))
    monkeypatch.setenv("KVSWEEP_CYCLE_TARGET", "20")
    monkeypatch.setenv("KVSWEEP_CHUNK_SLOTS", "512")
    settings = load_settings(chunk_slots=1024, cycle_target=None)
    assert (settings.slice_us, settings.cycle_target, settings.chunk_slots) == (50.0, 20.0, 1024)
    assert settings.per_segment and settings.host == "127.0.0.1"


@pytest.mark.parametrize("intensity", list(Intensity))
def test_intensity_sets_the_duties_unless_they_are_given(intensity: Intensity) -> None:
    """I5: the one number for the common case, and each budget on its own."""
    assert Settings(intensity=intensity).duties == DUTIES[intensity]
    assert Settings(intensity=intensity, host_duty=0.5).duties == (0.5, DUTIES[intensity][1])
    assert Settings(intensity=intensity, device_duty=1.0).duties == (DUTIES[intensity][0], 1.0)


@pytest.mark.parametrize(
    ("knob", "value", "accepted"),
    [
        ("intensity", "furious", "'low', 'normal' or 'high'"),
        ("host_duty", "0", "greater than 0"),
        ("device_duty", "1.5", "less than or equal to 1"),
        ("device_bytes_per_second", "-1", "greater than 0"),
        ("cycle_target", "soon", "valid number"),
        ("slice_us", "5", "greater than or equal to 10"),
        ("chunk_slots", "0", "greater than or equal to 1"),
        ("every_steps", "-1", "greater than or equal to 0"),
        ("stamps", "perhaps", "valid boolean"),
        ("findings_max_bytes", "1", "greater than or equal to 10000"),
        ("findings_backups", "101", "less than or equal to 100"),
        ("findings_per_minute", "0", "greater than or equal to 1"),
        ("port", "65536", "less than or equal to 65535"),
        ("port", "http", "valid integer"),
        ("token", "short", "at least 8 characters"),
        ("on_violation", "explode", "log, exit, or an import path package.module:callable"),
        ("on_violation", "package.module:", "log, exit, or an import path package.module:callable"),
    ],
)
def test_a_bad_value_is_named_with_what_is_accepted(
    monkeypatch: pytest.MonkeyPatch, knob: str, value: str, accepted: str
) -> None:
    """Issue 2: one line: the knob, the value found, what would do."""
    monkeypatch.setenv(f"KVSWEEP_{knob.upper()}", value)
    with pytest.raises(ConfigError) as caught:
        load_settings()
    message = str(caught.value)
    assert message.startswith(f"{knob}: ") and repr(value) in message and accepted in message and "\n" not in message


def test_all_bad_values_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 2: not one complaint a restart."""
    monkeypatch.setenv("KVSWEEP_PORT", "-1")
    with pytest.raises(ConfigError, match=r"host_duty: .*; .*port: |port: .*; .*host_duty: "):
        load_settings(host_duty=2)


def test_nothing_to_verify_is_an_error() -> None:
    """I6: a sweeper with every check off would look healthy and see nothing."""
    with pytest.raises(ConfigError, match="stamps and fingerprints are both off: nothing would be verified"):
        load_settings(stamps=False, fingerprints=False)
    assert load_settings(stamps=False).fingerprints


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("cycle_taget = 3\n", "cycle_taget: no such setting; the settings are "),
        ("cycle_target = = 3\n", "kvsweep.toml"),
        ("[sweeper]\ncycle_target = 3\n", "sweeper: no such setting; the settings are "),
    ],
)
def test_a_bad_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, says: str) -> None:
    """Issue 2: a typo in the file is an error, not a default."""
    file = tmp_path / "kvsweep.toml"
    file.write_text(content)
    monkeypatch.setenv("KVSWEEP_CONFIG", str(file))
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 2: KVSWEEP_CONFIG that points nowhere is an error, not a default."""
    monkeypatch.setenv("KVSWEEP_CONFIG", "/nowhere/kvsweep.toml")
    with pytest.raises(ConfigError, match=r"KVSWEEP_CONFIG=/nowhere/kvsweep\.toml: no such file"):
        load_settings()


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that opens but cannot be read")
def test_an_unreadable_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 2, I4: a file that cannot be read ends in one line, not in a trace."""
    monkeypatch.setenv("KVSWEEP_CONFIG", "/proc/self/mem")
    with pytest.raises(ConfigError, match="KVSWEEP_CONFIG=/proc/self/mem: "):
        load_settings()


def test_every_setting_says_what_it_is() -> None:
    """Issue 2: each knob has its one line; the error messages and the documentation show it."""
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []

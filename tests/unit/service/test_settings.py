"""Settings: environment, overrides, complaints."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.settings import ConfigError, Settings, load_settings, unknown_variables


def test_defaults() -> None:
    settings = load_settings()
    assert (settings.host, settings.port, settings.engine) == ("127.0.0.1", 8000, "vllm")
    assert settings.bundle is None
    assert settings.cache_dir == Path(".gti/cache")
    assert (settings.max_k, settings.default_beam_width, settings.max_beam_width) == (200, 20, 256)


def test_flag_beats_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GTI_PORT", "9000")
    monkeypatch.setenv("GTI_MAX_K", "7")
    monkeypatch.setenv("GTI_ENGINE", "")
    settings = load_settings({"port": "9001", "max_k": None})
    assert (settings.port, settings.max_k, settings.engine) == (9001, 7, "vllm")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"port": "99999"}, ["--port", "GTI_PORT", "65535", "'99999'"]),
        ({"port": "http"}, ["--port", "integer", "'http'"]),
        ({"engine": "tpu"}, ["--engine", "GTI_ENGINE", "vllm", "reference", "fake", "'tpu'"]),
        ({"max_k": "0"}, ["--max-k", "GTI_MAX_K"]),
        ({"max_k": "300"}, ["--max-k is 300", "--max-beam-width", "256"]),
        ({"default_beam_width": "300"}, ["--default-beam-width is 300"]),
        ({"host": "", "port": "-1"}, ["--host", "--port"]),
    ],
)
def test_complaints_are_one_line(overrides: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(overrides)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_limits_may_be_raised_together() -> None:
    assert load_settings({"max_k": "300", "max_beam_width": "300"}).max_k == 300


def test_unknown_variables() -> None:
    environ = {"GTI_PROT": "1", "GTI_PORT": "1", "gti_port": "1", "HOME": "x", "GTI_ZZZ": ""}
    assert unknown_variables(environ) == ["GTI_PROT", "GTI_ZZZ"]


def test_every_field_is_described() -> None:
    assert all(field.description for field in Settings.model_fields.values())

"""Settings of the service: one field each, with a flag and an environment twin.

``GTI_PORT`` and ``--port`` set the same field; the flag wins. The command line is built from the
fields below, so a new field needs no second declaration.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gti_core.errors import GtiError

ENV_PREFIX = "GTI_"
KEY_VARIABLE = "GTI_KEY"
"""Holds the key of a command that asks a running service. No flag: others could read that."""
_NOT_SETTINGS = {"GTI_COMPILE", "GTI_FAULT", KEY_VARIABLE}
"""Variables that other parts read: `gti_core.fusion`, `service.onboarding.faults`, the client."""
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:\d{1,5})?", re.ASCII)
_COLLECTOR = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?", re.ASCII)
WORKER_SETTINGS = ("bundle", "data_dir", "store", "text_encoder", "log_level", "log_format")
"""Fields that ``gti worker`` shares with ``gti serve``."""


class ConfigError(GtiError):
    """A setting has a value that can't be used. Names the flag and its environment twin."""

    code: ClassVar[str] = "config_invalid"


class Settings(BaseSettings):
    """Everything an operator can set. Read from ``GTI_*`` variables; immutable.

    Raises:
        pydantic.ValidationError: a bad value. `load_settings` turns it into `ConfigError`.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        validate_default=True,
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    bundle: Path | None = Field(
        None, description="Folder of the bundle to serve. Without it, the demo bundle."
    )
    engine: Literal["vllm", "vllm-per-beam", "reference", "fake"] = Field(
        "vllm",
        description="vllm serves, beams inside its worker; vllm-per-beam makes every beam a "
        "request (any model vLLM has); reference is the plain transformers oracle; fake has no "
        "model and makes scores up.",
    )
    data_dir: Path = Field(
        Path(".gti"), description="Folder for everything the service writes, caches included."
    )
    store: str | None = Field(
        None,
        min_length=1,
        description="Versions and jobs: a database URL, or the path of a SQLite file. Without it, "
        "gti.db in the data folder. Replicas share one PostgreSQL database.",
    )
    admin: bool = Field(
        True,
        description="Routes that change the catalogue.",
    )
    auth: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether callers need a key (gti keys add). auto: unless --host is a loopback "
        "address. off is for loopback addresses only.",
    )
    keys_file: Path | None = Field(
        None, description="File of the keys' hashes. Without it, keys.json in the data folder."
    )
    audit_log: str | None = Field(
        None,
        description="File for a line per change and per refused change. Without it, audit.jsonl "
        "in the data folder; - is standard error, off none.",
    )
    rate_limit: float = Field(
        0,
        ge=0,
        le=1_000_000,
        allow_inf_nan=False,
        description="Requests per second of each key, or of each address while there are no keys; "
        "0 is no limit. Two seconds' worth may come at once.",
    )
    cors_origin: str | None = Field(
        None,
        description="Origins whose pages may call the service, with commas, such as "
        "https://shop.example. Without it, none.",
    )
    grounding_worker: bool | None = Field(
        None,
        description="A worker process for new items, started and ended with the service. Without "
        "it, one runs if the bundle names its text encoder and the engine is not fake.",
    )
    text_encoder: Path | None = Field(
        None,
        description="Folder of the text encoder the bundle was tokenized with. Without it, the "
        "demo's.",
    )
    min_version_wait_s: float = Field(
        2.0, ge=0, le=60, description="Seconds that a request waits for its `min_version`."
    )
    vllm_dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Type of weights and activations in vLLM."
    )
    vllm_gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of a GPU's memory that vLLM takes."
    )
    vllm_kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="vLLM's KV cache in GiB. Without it, 1 on a CPU, on a GPU what is left.",
    )
    vllm_max_num_seqs: int = Field(
        256,
        ge=1,
        description="Most beams in one step of vLLM, per-beam; of prompts, with beams inside the "
        "worker, a twentieth of the scratch blocks at most.",
    )
    vllm_scratch_blocks: int = Field(
        512,
        ge=2,
        description="KV blocks for beams, out of the KV cache. A row takes one, sometimes two; "
        "what does not fit takes turns.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe log line that is written."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Log lines for people, or one JSON object a line."
    )
    otlp_endpoint: str | None = Field(
        None,
        description="URL of an OpenTelemetry collector, OTLP over HTTP, such as "
        "http://localhost:4318, to send traces to. Without it, none.",
    )
    max_k: int = Field(200, ge=1, le=100_000, description="Most items a request may ask for.")
    default_beam_width: int = Field(
        20, ge=1, le=100_000, description="Beam width of a request that names none and has k below."
    )
    max_beam_width: int = Field(
        256, ge=1, le=100_000, description="Widest beam a request may ask for."
    )
    max_history: int = Field(
        1000, ge=1, le=1_000_000, description="Most history entries a request may send."
    )
    max_listed: int = Field(
        10_000, ge=1, le=1_000_000, description="Most ids a request may include or exclude."
    )
    max_batch: int = Field(
        100, ge=1, le=10_000, description="Most requests that may be sent as one batch."
    )
    max_queued_beams: int = Field(
        2048,
        ge=1,
        le=10_000_000,
        description="Most beams of requests under way, running and waiting; above that 429.",
    )
    max_queued_tokens: int = Field(
        131_072,
        ge=1,
        le=1_000_000_000,
        description="Most prompt tokens of requests under way; above that 429.",
    )
    max_queue_ms: int = Field(
        2_000,
        ge=1,
        le=600_000,
        description="Milliseconds that the beams under way may take, by the speed measured; above "
        "that 429.",
    )
    timeout_ms: int = Field(
        10_000,
        ge=0,
        le=600_000,
        description="Milliseconds that a request without `timeout_ms` may take; 0 is no limit.",
    )
    max_body_bytes: int = Field(
        1_048_576, ge=1024, description="Largest request body accepted, in bytes."
    )
    shutdown_timeout_s: int = Field(
        30, ge=0, description="Seconds that accepted requests get to finish when the service stops."
    )

    @model_validator(mode="after")
    def _limits_agree(self) -> Settings:
        for name in ("max_k", "default_beam_width"):
            value = getattr(self, name)
            if value > self.max_beam_width:
                raise ValueError(
                    f"{flag(name)} is {value}, above {flag('max_beam_width')}, "
                    f"which is {self.max_beam_width}"
                )
        if self.max_beam_width > self.max_queued_beams:
            raise ValueError(
                f"{flag('max_beam_width')} is {self.max_beam_width}, above "
                f"{flag('max_queued_beams')}, which is {self.max_queued_beams}"
            )
        return self

    @field_validator("cors_origin")
    @classmethod
    def _origins(cls, value: str | None) -> str | None:
        for origin in _split(value):
            if not _ORIGIN.fullmatch(origin):
                raise ValueError("origins look like https://shop.example or http://localhost:3000")
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _collector(cls, value: str | None) -> str | None:
        if value is not None and not _COLLECTOR.fullmatch(value):
            raise ValueError("collectors look like http://localhost:4318")
        return value

    @model_validator(mode="after")
    def _off_for_loopback_only(self) -> Settings:
        if self.auth == "off" and not is_loopback(self.host):
            raise ValueError(
                f"{flag('auth')} off needs a loopback address, and {flag('host')} is {self.host}, "
                f"which others may reach: leave {flag('auth')} out and make a key with gti keys add"
            )
        return self

    @property
    def auth_on(self) -> bool:
        """Whether callers need a key."""
        return self.auth == "on" or (self.auth == "auto" and not is_loopback(self.host))

    @property
    def keys_path(self) -> Path:
        """The keys file."""
        return self.keys_file or self.data_dir / "keys.json"

    @property
    def audit_target(self) -> str:
        """Path of the audit log, ``-`` for standard error, empty for none."""
        if self.audit_log is None:
            return str(self.data_dir / "audit.jsonl")
        # A variable that is empty counts as not set, so there is a word for it too.
        return "" if self.audit_log == "off" else self.audit_log

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """Origins whose pages may call the service, as browsers write them."""
        return _split(self.cors_origin)

    @property
    def cache_dir(self) -> Path:
        """Folder of merged models and other things that can be made again."""
        return self.data_dir / "cache"

    @property
    def store_url(self) -> str:
        """URL or path of the store."""
        return self.store or str(self.data_dir / "gti.db")


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _split(origins: str | None) -> tuple[str, ...]:
    parts = (part.strip().rstrip("/").lower() for part in (origins or "").split(","))
    return tuple(part for part in parts if part)


def flag(field: str) -> str:
    """Command-line flag of a field."""
    return "--" + field.replace("_", "-")


def env_name(field: str) -> str:
    """Environment variable of a field."""
    return ENV_PREFIX + field.upper()


def load_settings(overrides: Mapping[str, Any] | None = None) -> Settings:
    """Settings from the environment, with ``overrides`` (field name -> value) on top.

    Raises:
        ConfigError: a bad value; the message is one line that names flag and variable.
    """
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        raise ConfigError("; ".join(_complaint(dict(e)) for e in error.errors())) from error


def _complaint(error: dict[str, Any]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:
        return message
    field = str(error["loc"][0])
    return f"{flag(field)} ({env_name(field)}): {message}, got {error['input']!r}"


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Names of ``GTI_*`` variables that set nothing, sorted: most often a typing slip."""
    names: Iterable[str] = os.environ if environ is None else environ
    known = {env_name(field) for field in Settings.model_fields} | _NOT_SETTINGS
    return sorted(
        name for name in names if name.upper().startswith(ENV_PREFIX) and name.upper() not in known
    )

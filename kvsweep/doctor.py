"""`kvsweep doctor`: what is installed on this machine, what would be covered, and how to switch it on."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from kvsweep import __version__
from kvsweep.config import ConfigError, Settings, load_settings
from kvsweep.engines.sglang import EVENT_LOOP, SUPPORTED_VERSIONS, enabled

OK, NOTE, FAIL = "ok", "note", "FAIL"
MINIMUM = {"torch": (2, 6), "triton": (3, 2), "numba": (0, 60), "prometheus-client": (0, 20)}
PLUGIN_GROUP = "sglang.srt.plugins"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report. `level` is OK, NOTE (works with less, or is the operator's choice) or FAIL."""

    level: str
    name: str
    detail: str


def main(server: str | None = None, out: Callable[[str], None] = print) -> int:
    """Print the report; 0 if kvsweep can sweep an SGLang server on this machine, else 1.

    Args:
        server: base URL of a running SGLang server (``http://127.0.0.1:30000``), to say what would be covered there.
        out: takes the report line by line.
    """
    checks = [*_packages(), *_cuda(), *_sglang(), *_settings()]
    if server:
        checks += _server(server)
    out(f"kvsweep {__version__}")
    width = max(len(check.name) for check in checks)
    for check in checks:
        out(f"{check.level:>5}  {check.name:<{width}}  {check.detail}")
    failed = [check.name for check in checks if check.level == FAIL]
    out("")
    if failed:
        out(f"kvsweep cannot sweep SGLang here yet: {', '.join(failed)}.")
        return 1
    out("Start the server with these lines in its environment:")
    for line in _lines():
        out(f"    {line}")
    return 0


def _packages() -> Iterator[Check]:
    found = ".".join(map(str, sys.version_info[:3]))
    yield Check(level=OK if sys.version_info >= (3, 10) else FAIL, name="python", detail=f"{found} (needs 3.10)")
    for name, minimum in MINIMUM.items():
        needs = ".".join(map(str, minimum))
        try:
            found = installed_version(name)
        except PackageNotFoundError:
            level = NOTE if name == "triton" else FAIL
            yield Check(level=level, name=name, detail=f"not installed (needs {needs}{_triton_only(name)})")
            continue
        new_enough = tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) >= minimum
        yield Check(level=OK if new_enough else FAIL, name=name, detail=f"{found} (needs {needs}{_triton_only(name)})")


def _triton_only(name: str) -> str:
    return "; only for GPUs" if name == "triton" else ""


def _cuda() -> Iterator[Check]:
    try:
        import torch
    except ImportError as error:
        yield Check(level=FAIL, name="cuda", detail=f"torch cannot be imported: {error}")
        return
    if not torch.cuda.is_available():
        built = torch.version.cuda or "none"
        yield Check(level=NOTE, name="cuda", detail=f"no GPU visible (torch built for CUDA {built}): CPU backend only")
        return
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        yield Check(
            level=OK,
            name=f"gpu {i}",
            detail=f"{torch.cuda.get_device_name(i)}, compute capability {major}.{minor}, CUDA {torch.version.cuda}",
        )


def _sglang() -> Iterator[Check]:
    supported = ", ".join(SUPPORTED_VERSIONS)
    try:
        found = installed_version("sglang")
    except PackageNotFoundError:
        yield Check(level=FAIL, name="sglang", detail=f"not installed in this environment (supported: {supported})")
        return
    level = OK if found in SUPPORTED_VERSIONS else FAIL
    yield Check(level=level, name="sglang", detail=f"{found} (supported: {supported})")
    yield _event_loop()
    yield from _plugin()


def _event_loop() -> Check:
    """Whether SGLang has the method the plugin hooks; its source is parsed, not imported."""
    module, cls, method = EVENT_LOOP.rsplit(".", 2)
    spec = importlib.util.find_spec("sglang")
    base = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else Path()
    source = base.joinpath(*module.split(".")[1:]).with_suffix(".py")
    try:
        tree = ast.parse(source.read_text())
    except (OSError, SyntaxError) as error:
        return Check(level=FAIL, name="hook", detail=f"{module} cannot be read: {error}")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == cls:
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            if method in methods:
                return Check(level=OK, name="hook", detail=EVENT_LOOP)
    return Check(level=FAIL, name="hook", detail=f"SGLang has no {EVENT_LOOP}")


def _plugin() -> Iterator[Check]:
    ours = [entry for entry in entry_points(group=PLUGIN_GROUP) if entry.name == "kvsweep"]
    if not ours:
        detail = f"no entry point kvsweep in group {PLUGIN_GROUP}: install kvsweep in SGLang's environment"
        yield Check(level=FAIL, name="plugin", detail=detail)
        return
    yield Check(level=OK, name="plugin", detail=f"found: {ours[0].value}")
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    if allowed and "kvsweep" not in allowed:
        detail = f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} leaves kvsweep out: add it"
        yield Check(level=FAIL, name="allow list", detail=detail)


def _settings() -> Iterator[Check]:
    detail = "on" if enabled() else "off: set KVSWEEP_ENABLED=1 (installing kvsweep changes nothing by itself)"
    yield Check(level=OK if enabled() else NOTE, name="KVSWEEP_ENABLED", detail=detail)
    try:
        settings = load_settings()
    except ConfigError as error:
        yield Check(level=FAIL, name="settings", detail=str(error))
        return
    yield Check(level=OK, name="settings", detail=_summary(settings))


def _summary(settings: Settings) -> str:
    host, device = settings.duties
    listens = f"http://{settings.host}:{settings.port} + rank" if settings.http else "no port"
    return (
        f"every slot about every {settings.cycle_target:g} s, at most {host:.1%} of a core and {device:.0%} of the "
        f"device; {listens}; on a violation: {settings.on_violation}"
    )


def _server(url: str) -> Iterator[Check]:
    """What kvsweep would make of a running server, from its /server_info."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/server_info", timeout=10) as response:
            info = json.load(response)
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        yield Check(level=FAIL, name="server", detail=f"{url}/server_info: {reason}; expected a running SGLang server")
        return
    found = str(info.get("version", "unknown"))
    level = OK if found in SUPPORTED_VERSIONS else FAIL
    yield Check(
        level=level, name="server", detail=f"SGLang {found} at {url} (supported: {', '.join(SUPPORTED_VERSIONS)})"
    )
    for level, name, detail in _coverage(info):
        yield Check(level=level, name=name, detail=detail)


def _coverage(info: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Level, name and detail of each part of a server, given its resolved arguments.

    The classes of its pools are known only inside the server: kvsweep lists every tensor it reads, and every one it
    cannot, in the server's log and in its /status when it starts.
    """
    if info.get("disable_radix_cache"):
        yield FAIL, "prefix cache", "off (--disable-radix-cache): there is nothing to sweep"
        return
    layout = f"page size {info.get('page_size')}, KV dtype {info.get('kv_cache_dtype')}"
    if info.get("enable_unified_memory"):
        yield FAIL, "KV pools", "--enable-unified-memory relocates slots: not supported"
    else:
        yield OK, "KV pools", f"every layer's K and V (or MLA rows), both pools with a sliding window; {layout}"
    if info.get("kv_canary") in ("log", "raise") and not info.get("enable_hierarchical_cache"):
        yield OK, "stamps", f"SGLang's canary ({info['kv_canary']}) is verified too"
    else:
        yield NOTE, "stamps", "none to verify (start with --kv-canary log to have them)"
    if info.get("enable_hierarchical_cache"):
        yield NOTE, "host tier", "HiCache: device slots are swept, copies in host memory and storage are not"
    if info.get("speculative_algorithm"):
        yield NOTE, "draft model", "its pool is not verified"
    if info.get("disaggregation_mode") not in (None, "null"):
        yield NOTE, "light pass", "no accounting of requests' slots with disaggregation"
    ranks = int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1) * int(info.get("dp_size") or 1)
    yield OK, "ranks", f"{ranks}: one sweeper and one port each"


def _lines() -> list[str]:
    """Environment lines; what is set already is repeated as it is, except for the token."""
    values = {"KVSWEEP_ENABLED": "1", "KVSWEEP_PORT": "9464"}
    values |= {name: value for name, value in sorted(os.environ.items()) if name.startswith("KVSWEEP_")}
    values["KVSWEEP_ENABLED"] = "1"
    if "KVSWEEP_TOKEN" in values:
        values["KVSWEEP_TOKEN"] = "<as it is set here>"
    return [f"export {name}={value}" for name, value in values.items()]

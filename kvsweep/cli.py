"""The command line: `kvsweep demo`, `doctor`, `bench`, `findings`, `ctl`."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from kvsweep import __version__
from kvsweep.config import ConfigError, Intensity, load_settings

app = typer.Typer(
    help="A background scrubber for LLM prefix caches: finds silent KV-cache corruption while the server serves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """See `kvsweep COMMAND --help`."""


@app.command()
def demo(
    fault: Annotated[
        str, typer.Option(help="What to break in a cached prefix; 'list' shows the choices.")
    ] = "bit_flip_v",
    fault_after: Annotated[float, typer.Option(min=0, help="Earliest second at which to break it.")] = 4.0,
    serve: Annotated[bool, typer.Option(help="Keep running after the fault, for scraping, until interrupted.")] = False,
    port: Annotated[int | None, typer.Option(help="Port of /metrics and the status page (0: any free one).")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    intensity: Annotated[Intensity | None, typer.Option(help="How hard the sweep works.")] = None,
    findings_path: Annotated[Path | None, typer.Option(help="JSON-lines log of findings.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    swa: Annotated[bool, typer.Option(help="A model with sliding-window layers (two pools).")] = False,
    page_size: Annotated[int, typer.Option(min=1, help="Slots of a page.")] = 1,
    rank: Annotated[int, typer.Option(min=0, help="tp_rank label, to run several side by side.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 0,
) -> None:
    """Run a small real LLM engine under traffic with the sweeper on, corrupt a cached prefix, and find it.

    Exit code 0 if and only if the planted fault was found and nothing else was.
    """
    from kvsweep.demo import Demo, DemoError, fault_choices

    if fault == "list":
        print(fault_choices())
        raise typer.Exit
    console = Console()
    log_to = RichHandler(console=console, show_path=False, show_level=True, markup=False)
    logging.basicConfig(level=logging.WARNING, handlers=[log_to], format="%(message)s", datefmt="%X")
    try:
        settings = load_settings(
            host=host,
            port=port,
            intensity=intensity or Intensity.HIGH,
            findings_path=findings_path,
            cycle_target=2.0,
            light_interval=0.3,
            per_segment=True,
        )
        run = Demo(settings, fault=fault, fault_after=fault_after, serve=serve, device=device, swa=swa,
                   page_size=page_size, rank=rank, seed=seed, console=console)  # fmt: skip
        raise typer.Exit(run.run())
    except (ConfigError, DemoError) as error:
        _die(str(error))


@app.command()
def findings(
    file: Annotated[Path, typer.Argument(help="A JSON-lines findings log.")],
    json_lines: Annotated[bool, typer.Option("--json", help="Print the lines as they are.")] = False,
) -> None:
    """Show a findings log as a table, oldest first."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        _die(f"{file}: {error.strerror}")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError:
            _die(f"{file}: line {number} is not JSON; expected a findings log written by kvsweep")
    if json_lines:
        print("\n".join(lines))
        return
    console = Console()
    console.print(findings_table(records, wide=console.width >= 130) if records else f"{file}: no findings")


def findings_table(records: list[dict[str, Any]], *, wide: bool) -> Table:
    """Findings as a table, one row each; `wide` adds what fits no narrow terminal."""
    table = Table(title=f"{len(records)} finding{'s' * (len(records) != 1)}", pad_edge=False)
    for column in ("confirmed", "check", "where", "token", "prefix"):
        table.add_column(column, overflow="fold", no_wrap=column in ("confirmed", "check"))
    for column in ("expected", "actual", "id") if wide else ():
        table.add_column(column, no_wrap=True)
    for record in records:
        when = datetime.fromtimestamp(record["confirmed_at"]).strftime("%m-%d %H:%M:%S")
        where = (record["pool"], record["segment"], "" if record["slot"] is None else f"slot {record['slot']}")
        token = "" if record["position"] is None else f"{record['token']} at {record['position']}"
        row = [when, record["check"], " ".join(part for part in where if part), token, record["prefix_hash"]]
        row += [record["expected"], record["actual"], record["id"]] if wide else []
        table.add_row(*("-" if cell in (None, "") else str(cell) for cell in row))
    return table


@app.command()
def doctor(
    server: Annotated[str | None, typer.Option(help="Base URL of a running SGLang server to look at.")] = None,
) -> None:
    """Say whether kvsweep can sweep an SGLang server on this machine, what it would cover, and how to start it."""
    from kvsweep.doctor import main as report

    raise typer.Exit(report(server))


@app.command()
def ctl(
    command: Annotated[str, typer.Argument(help="status, pause, resume, run, cancel or recheck.")],
    url: Annotated[str | None, typer.Option(help="Base URL; by default KVSWEEP_HOST and KVSWEEP_PORT.")] = None,
    kind: Annotated[str, typer.Option(help="Of the pass that `run` starts: deep or light.")] = "deep",
) -> None:
    """Ask a running sweeper how it is, or tell it what to do, over its HTTP port."""
    from kvsweep.ctl import ControlError, base_url, control

    try:
        settings = load_settings()
        print(control(command, url=url or base_url(settings), token=settings.token, kind=kind))
    except (ConfigError, ControlError) as error:
        _die(str(error))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Which one; without a name they are listed.")] = "",
) -> None:
    """Run one of the benchmarks, e.g. `kvsweep bench gpu`; what follows the name is passed on to it."""
    import runpy

    package = Path(__file__).parent
    folder = next(path for path in (package / "_bench", package.parent / "tests" / "bench") if path.is_dir())
    scripts = {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("test_")}
    if name not in scripts:
        for stem, path in scripts.items():
            about = next((line for line in path.read_text(encoding="utf-8").splitlines() if line), "").strip('"')
            print(f"  {stem:14}{about}")
        _die(f"bench: expected one of {', '.join(scripts)}" + (f", not {name}" if name else ""))
    sys.argv = [f"kvsweep bench {name}", *context.args]
    sys.path.insert(0, str(folder))
    runpy.run_path(str(scripts[name]), run_name="__main__")


def _die(message: str) -> NoReturn:
    print(f"kvsweep: {message}", file=sys.stderr)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()

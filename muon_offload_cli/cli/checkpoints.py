"""``muon-offload checkpoints``: what a directory holds, and whether it can be trusted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from muon_offload_cli.checkpoints.listing import Found, as_json, content_fault, list_checkpoints
from muon_offload_cli.checkpoints.names import step_of
from muon_offload_cli.errors import command, wrong
from muon_offload_cli.machine.filesystem import folder_fault
from muon_offload_cli.units import format_bytes


def checkpoints(
    directory: Annotated[
        Path, typer.Argument(help="A checkpoint directory (checkpoint.directory of a run).")
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file through and compare hashes.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List checkpoints: steps, sizes, complete or not, and the run they came from.

    Exits with 2 if --verify finds damage; a save that was interrupted before it stood in its place is none.
    """
    if fault := folder_fault(directory):
        raise wrong(f"{directory}: {fault}.", "muon-offload checkpoints DIRECTORY")
    if step_of(directory) is not None:
        raise wrong(
            f"{directory} is a checkpoint itself.",
            command("muon-offload", "checkpoints", directory.parent),
        )
    try:
        found = list_checkpoints(directory)
    except OSError as error:
        raise wrong(
            f"{directory} cannot be read: {error.strerror}.", "give a folder that you may read"
        ) from error
    if verify:
        found = [
            replace(each, fault=content_fault(each.folder, each.seal))
            if each.complete and each.seal is not None
            else each
            for each in found
        ]
    if json:
        typer.echo(as_json(found))
    else:
        for each in found:
            typer.echo(_line(each, verified=verify))
        if not found:
            typer.echo(f"no checkpoints in {directory}")
    if verify and any(not each.complete and not each.growing for each in found):
        raise typer.Exit(2)


def _line(each: Found, *, verified: bool) -> str:
    state = f"INCOMPLETE: {each.fault}" if each.fault else "complete"
    seal = each.seal
    if seal is None:
        origin = "" if each.fault else "by plain Megatron, no hashes to compare"
        return "  ".join(filter(None, [f"step {each.step:>8}", format_bytes(each.size), state, origin]))
    if verified and not each.fault:
        state = "complete, every byte compared"
    sizes = " ".join(f"{name}{size}" for name, size in seal.layout.items() if size > 1)
    ranks = f"{seal.world_size} ranks ({sizes})" if seal.world_size > 1 else "1 rank"
    holds = "" if seal.optimizer else ", weights only"
    origin = f"{ranks}, engine {seal.engine}, chunk {seal.chunk_mb:g} MiB{holds}"
    return "  ".join([f"step {each.step:>8}", format_bytes(each.size), state, origin, seal.saved_at])

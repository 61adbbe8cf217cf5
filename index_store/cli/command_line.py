"""`index-store`: look at a store of contexts, check it, clean it up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from index_store.cli import report
from index_store.cli.app import new_app
from index_store.cli.console import byte_progress, format_bytes, on_terminal, print_json, print_table
from index_store.cli.options import FormatOption, OutputFormat, StoreOption
from index_store.errors import SparseKVError
from index_store.store.catalog import BrokenContext, Leftover, Store
from index_store.store.manifest import Manifest

app = new_app("Look at a store of contexts, check it, clean it up.")

RefArgument = Annotated[
    str,
    typer.Argument(metavar="CONTEXT", help="A context: id, contexts/<id>, first digits of an id, or name."),
]
RefArguments = Annotated[
    list[str],
    typer.Argument(metavar="CONTEXT", help="Contexts: id, contexts/<id>, first digits of an id, or name."),
]
OptionalRefArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="CONTEXT", help="Contexts to check; all of the store when none is given."),
]


@app.command("ls")
def list_contexts(store: StoreOption, output: FormatOption = OutputFormat.TEXT) -> None:
    """List the contexts, newest first.

    A context is READY, EXPIRED, or BROKEN when its manifest cannot be read.
    """
    opened = Store(store)
    entries = [(entry, _is_expired(opened, entry)) for entry in opened.entries()]
    leftovers = opened.leftovers()
    if output is OutputFormat.JSON:
        contexts = [report.summary(*entry) for entry in entries]
        print_json({"store": str(store), "contexts": contexts, "leftovers": report.leftover_list(leftovers)})
        return
    if entries:
        _print_contexts(entries)
    else:
        typer.echo(f"{store} holds no contexts.")
    _tell_leftovers(leftovers)


def _print_contexts(entries: Sequence[tuple[Manifest | BrokenContext, bool]]) -> None:
    id_length = 12 if on_terminal() else 64
    rows = [report.list_row(*entry, id_length) for entry in entries]
    print_table(report.LIST_COLUMNS, rows, right=report.LIST_RIGHT, optional=report.LIST_OPTIONAL)
    for entry, _ in entries:
        if isinstance(entry, BrokenContext):
            typer.echo(f"{entry.id[:id_length]}: {entry.error.message}", err=True)


@app.command("show")
def show_context(ref: RefArgument, store: StoreOption, output: FormatOption = OutputFormat.TEXT) -> None:
    """Show all about one context: sizes, parameters, times."""
    opened = Store(store)
    manifest = opened.manifest(opened.resolve(ref))
    expired = opened.expired(manifest)
    if output is OutputFormat.JSON:
        print_json(report.details(manifest, expired))
        return
    rows = report.detail_rows(manifest, expired)
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        typer.echo(f"{label:<{width}}  {value}")


@app.command("verify")
def verify_contexts(
    store: StoreOption, refs: OptionalRefArguments = None, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Read every byte of contexts and name each bad file.

    Exits with 1 when there is one. A file that belongs to no context is told, too.
    """
    opened = Store(store)
    ids = _resolve_all(opened, refs) if refs else [entry.id for entry in opened.entries()]
    results = {id_: _verify(opened, id_) for id_ in ids}
    leftovers = opened.leftovers() if not refs else ()
    if output is OutputFormat.JSON:
        contexts = [
            {"id": id_, "ok": not errors, "errors": [report.error_object(error) for error in errors]}
            for id_, errors in results.items()
        ]
        told = {"leftovers": report.leftover_list(leftovers)} if not refs else {}
        print_json({"ok": not any(results.values()), "contexts": contexts, **told})
    else:
        for id_, errors in results.items():
            typer.echo(f"{id_}: {'ok' if not errors else f'{len(errors)} bad'}")
            for error in errors:
                typer.echo(f"  {error.reason}: {error.message}")
        if not results:
            typer.echo(f"{store} holds no contexts.")
        _tell_leftovers(leftovers)
    if any(results.values()):
        raise typer.Exit(1)


@app.command("rm")
def remove_contexts(refs: RefArguments, store: StoreOption, output: FormatOption = OutputFormat.TEXT) -> None:
    """Remove contexts; none unless every one is found."""
    opened = Store(store)
    ids = _resolve_all(opened, refs)
    for id_ in ids:
        opened.delete(id_)
    if output is OutputFormat.JSON:
        print_json({"removed": ids})
        return
    for id_ in ids:
        typer.echo(f"removed {id_}")


@app.command("gc")
def collect_garbage(
    store: StoreOption,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Remove leftovers and expired contexts.

    Leftovers are what killed jobs and deletions left; what a running job writes is not touched.
    """
    removed = Store(store).gc(dry_run=dry_run)
    total = sum(item.nbytes for item in removed)
    if output is OutputFormat.JSON:
        items = [{"kind": item.kind, "path": str(item.path), "bytes": item.nbytes} for item in removed]
        print_json({"dry_run": dry_run, "bytes": total, "removed": items})
        return
    verb = "would remove" if dry_run else "removed"
    for item in removed:
        typer.echo(f"{verb} {item.kind} {item.path} ({format_bytes(item.nbytes)})")
    typer.echo(f"{verb} {len(removed)} folder{'' if len(removed) == 1 else 's'}, {format_bytes(total)}")


def _tell_leftovers(leftovers: Sequence[Leftover]) -> None:
    """A sentence on standard error about what takes space and is no context."""
    if leftovers:
        typer.echo(report.leftovers_text(leftovers), err=True)


def _is_expired(store: Store, entry: Manifest | BrokenContext) -> bool:
    return isinstance(entry, Manifest) and store.expired(entry)


def _resolve_all(store: Store, refs: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(store.resolve(ref) for ref in refs))


def _verify(store: Store, id_: str) -> Sequence[SparseKVError]:
    try:
        total = sum(array.nbytes for array in store.manifest(id_).arrays)
        with byte_progress(f"verifying {id_[:12]}", total) as advance:
            return store.verify(id_, advance)
    except SparseKVError as error:
        return [error]

"""`index-store`: look at a store of contexts, note things of them, check it, clean it up.

What reads files of contexts, or an object store, is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from index_store.cli import report
from index_store.cli.app import new_app
from index_store.cli.console import byte_progress, print_json
from index_store.cli.options import (
    FormatOption,
    InputFile,
    MoveNameOption,
    ObjectsOption,
    OutputFile,
    OutputFormat,
    StoreOption,
)
from index_store.cli.report import (
    LabelOption,
    PinOption,
    RecursiveOption,
    ReferenceArgument,
    ReferenceArguments,
    parse_labels,
    print_done,
    print_either,
    with_labels,
)
from index_store.errors import (
    InvalidArgumentError,
    ManifestError,
    ParentMissingError,
    SparseKVError,
    StoreError,
    format_bytes,
)
from index_store.family.parents import parent_of
from index_store.store.catalog import Store, require_free, take_name
from index_store.store.clean_up import clean_up, find_leftovers
from index_store.store.description.manifest import Manifest
from index_store.store.files.leftovers import Leftover

app = new_app("Look at a store of contexts, check it, clean it up.")

OptionalRefArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="CONTEXT", help="Contexts to check; all of the store when none is given."),
]


@app.command("ls")
def list_contexts(store: StoreOption, output: FormatOption = OutputFormat.TEXT) -> None:
    """List the contexts, newest first.

    A context is READY or EXPIRED; where its manifest cannot be used, CORRUPT, UNSUPPORTED or UNAVAILABLE.
    """
    opened = Store(store)
    contexts = [report.stored_info(opened, entry) for entry in opened.entries()]
    leftovers = find_leftovers(opened)
    if output is OutputFormat.JSON:
        shown = [report.context_object(context) for context in contexts]
        print_json({"store": str(store), "contexts": shown, "leftovers": report.leftover_list(leftovers)})
        return
    if contexts:
        report.print_contexts(contexts, memory=any(context.placement for context in contexts))
    else:
        typer.echo(f"{store} holds no contexts.")
    _tell_leftovers(leftovers)


@app.command("show")
def show_context(
    ref: ReferenceArgument, store: StoreOption, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Show all about one context: sizes, parameters, times."""
    opened = Store(store)
    manifest = opened.manifest(opened.resolve(ref))
    context = report.stored_info(opened, manifest)
    if output is OutputFormat.JSON:
        print_json(report.stored_object(context, manifest))
    else:
        report.print_rows([*report.detail_rows(context), *report.stored_rows(manifest)])


@app.command("verify")
def verify_contexts(
    store: StoreOption,
    refs: OptionalRefArguments = None,
    objects: ObjectsOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Read every byte of contexts and name each bad file.

    Exits with 1 when there is one. What is in an object store alone is read there with --objects. A file in the folder
    of a context that is not part of it is one, too. What killed jobs left is told, and nothing else that lies in the
    store.
    """
    from index_store.objects.tier import open_store

    opened = open_store(store, objects=objects)
    ids = _resolve_all(opened, refs) if refs else [entry.id for entry in opened.entries()]
    results = {id_: _verify(opened, id_) for id_ in ids}
    leftovers = find_leftovers(opened) if not refs else ()
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


RequiredObjectsOption = Annotated[
    str,
    typer.Option(
        "--objects",
        envvar="SPARSEKV_OBJECTS",
        metavar="URL",
        help="The object store, such as s3://BUCKET/PREFIX.",
    ),
]


@app.command("sync")
def sync_store(
    store: StoreOption, objects: RequiredObjectsOption, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Make a store and an object store alike.

    Exits with 1 if that fails. What was made, changed or deleted in one of them comes to the other. Contexts of the
    object store are listed then, and fetched when they are needed. Servers and workers with --objects do this by
    themselves.
    """
    from index_store.objects.courier import Courier
    from index_store.objects.tier import Tier, open_store

    opened = open_store(store, create=True, objects=objects)
    courier = Courier(opened, Tier.of(opened))
    _ = Tier.of(opened).bucket  # refuses a URL that is none
    # What comes first may be seen only behind what needs it: twice suffices.
    done = courier.look(wait=True) or courier.look(wait=True)
    state = courier.state()
    if output is OutputFormat.JSON:
        print_json({"done": done, "pending": state.pending, "problem": state.problem})
    elif done:
        typer.echo(f"{store} and {objects} have the same {len(opened.list())} contexts")
    if not done:
        raise StoreError(
            f"{state.pending} contexts are not in {objects} as they are here: "
            f"{state.problem or 'another process is at it, or they are in use'}"
        )


@app.command("fetch")
def fetch_contexts(
    refs: ReferenceArguments,
    store: StoreOption,
    objects: RequiredObjectsOption,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Bring contexts from an object store, every byte verified."""
    from index_store.objects.tier import open_store

    opened = open_store(store, objects=objects, fetch_timeout_s=None)
    ids = _resolve_all(opened, refs)
    for id_ in ids:
        opened.bring(id_)
    print_done("fetched", ids, output)


@app.command("rm")
def remove_contexts(
    refs: ReferenceArguments,
    store: StoreOption,
    recursive: RecursiveOption = False,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Remove contexts; none unless every one is found.

    A context that others continue, its children, stays unless they are removed with it. What an object store holds of
    it is deleted, too, and so it is in all stores in front of that.
    """
    opened = Store(store)
    ids = _resolve_all(opened, refs)
    removed: list[str] = []
    for id_ in _children_first(opened, ids):
        if id_ not in removed:
            removed += opened.delete(id_, recursive=recursive)
    print_done("removed", removed, output)


def _children_first(store: Store, ids: Sequence[str]) -> list[str]:
    """The same ids: who removes a parent and its children need not say it in that order."""
    children = {entry.id for entry in store.list() if entry.parent is not None}
    return sorted(ids, key=lambda id_: id_ not in children)


@app.command("update")
def update_context(
    ref: ReferenceArgument,
    store: StoreOption,
    name: Annotated[
        str | None, typer.Option("--name", help="Display name; it belongs to one context of a model.")
    ] = None,
    move_name: MoveNameOption = False,
    label: LabelOption = None,
    pin: PinOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Change a context's name, labels and pin."""
    labels = parse_labels(label or ())
    if name is None and pin is None and not labels:
        raise InvalidArgumentError("expected --name, --label, --pin or --unpin, which say what is to change")
    opened = Store(store)
    id_ = opened.resolve(ref)
    try:
        changed = opened.update(id_, partial(_changed, labels, pin))
        if name is not None:
            if not move_name:
                require_free(opened, name, changed.model.fingerprint, id_, changed.tenant)
            changed = take_name(opened, id_, name)
    except ManifestError as error:  # of a name or labels that no context can have
        raise InvalidArgumentError(error.message) from None
    report.print_context(report.stored_info(opened, changed), output)


def _changed(labels: Mapping[str, str | None], pinned: bool | None, present: Manifest) -> Manifest:
    pinned = present.pinned if pinned is None else pinned
    return replace(present, labels=with_labels(present.labels, labels), pinned=pinned)


@app.command("export")
def export(
    ref: ReferenceArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")],
    store: StoreOption,
    with_parents: Annotated[
        bool,
        typer.Option(
            "--with-parents", help="Write the context that it continues, too, beside it, as FILE.parent."
        ),
    ] = False,
    objects: ObjectsOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Write a context into one file, which `import` reads.

    Every byte is verified on the way.
    """
    from index_store.objects.context_file import export_context, file_bytes
    from index_store.objects.tier import open_store

    OutputFile().check("FILE", file)
    opened = open_store(store, objects=objects, fetch_timeout_s=None)
    manifest = opened.manifest(opened.resolve(ref))
    parent = parent_of(opened, manifest)
    wanted = [(manifest, file)]
    if with_parents and parent is not None:
        wanted.insert(0, (parent, file.with_name(f"{file.name}.parent")))
    sizes = []
    for each, path in wanted:
        with byte_progress(f"exporting {each.id[:12]}", file_bytes(each)) as advance:
            sizes.append(export_context(opened, each, path, advance))
    written = [(each, path, nbytes) for (each, path), nbytes in zip(wanted, sizes, strict=True)]
    told = [
        {"id": each.id, "file": str(path), "bytes": nbytes, "parent": each.parent and each.parent.id}
        for each, path, nbytes in written
    ]
    lines = (f"{each.id}: {path} ({format_bytes(nbytes)})" for each, path, nbytes in written)
    print_either(output, {"exported": told}, *lines)
    if parent is not None and not with_parents and output is OutputFormat.TEXT:
        typer.echo(f"it continues {parent.id}, which a store must have before this is imported", err=True)


@app.command("import")
def import_files(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Files that `export` wrote.")],
    store: StoreOption,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Bring contexts into a store from files that `export` wrote.

    The store is made when it is not there. A context appears when all of it is verified. One that is there already
    stays as it is.
    """
    from index_store.objects.context_file import import_context

    for file in files:
        InputFile().check("FILE", file)
    opened = Store(store, create=True)
    imported = []
    for file in files:
        with byte_progress(f"importing {file.name}", file.stat().st_size) as advance:
            imported.append(import_context(opened, file, advance))
    document = {"imported": [{"id": each.id, "name": each.name, "new": new} for each, new in imported]}
    lines = (f"{each.id}: {each.name}{'' if new else ' (was there already)'}" for each, new in imported)
    print_either(output, document, *lines)


@app.command("gc")
def collect_garbage(
    store: StoreOption,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Remove leftovers and expired contexts.

    Leftovers are what killed jobs and deletions left; what a running job writes is not touched.
    """
    removed = clean_up(Store(store), dry_run=dry_run)
    total = sum(item.nbytes for item in removed)
    items = [{"kind": item.kind, "path": str(item.path), "bytes": item.nbytes} for item in removed]
    verb = "would remove" if dry_run else "removed"
    lines = [f"{verb} {item.kind} {item.path} ({format_bytes(item.nbytes)})" for item in removed]
    lines += [f"{verb} {len(removed)} item{'' if len(removed) == 1 else 's'}, {format_bytes(total)}"]
    print_either(output, {"dry_run": dry_run, "bytes": total, "removed": items}, *lines)


def _tell_leftovers(leftovers: Sequence[Leftover]) -> None:
    """A sentence on standard error about what takes space and is no context."""
    if leftovers:
        typer.echo(report.leftovers_text(leftovers), err=True)


def _resolve_all(store: Store, refs: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(store.resolve(ref) for ref in refs))


def _verify(store: Store, id_: str) -> Sequence[SparseKVError]:
    try:
        manifest = store.manifest(id_)
        total = sum(array.nbytes for array in manifest.arrays)
        with byte_progress(f"verifying {id_[:12]}", total) as advance:
            problems = [*store.verify(id_, advance), *_parent_problems(store, id_)]
            if store.beyond is not None and store.elsewhere(id_):
                from index_store.objects.context_file import nowhere, receive
                from index_store.objects.tier import Tier, open_object

                source, contents = open_object(Tier.of(store).bucket, manifest)
                receive(source, contents.parts, nowhere, advance)
            return problems
    except SparseKVError as error:
        return [error]


def _parent_problems(store: Store, id_: str) -> Sequence[SparseKVError]:
    """What is wrong with the context that a child continues."""
    try:
        parent_of(store, store.manifest(id_))
    except ParentMissingError as error:
        return [error]
    except SparseKVError:  # told before
        pass
    return []

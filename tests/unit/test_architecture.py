"""The arrows of docs/architecture.md hold: rooms import only rooms below them, without circles."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "hvd_elastic"

LEVELS = (
    {""},
    {"model"},
    {"policy"},
    {"control"},
    {"wire", "records", "checkpoint", "programs", "hosts"},
    {"leader", "agent", "communicator", "worker", "input"},
    {"script", "data"},
    {"torch", "tensorflow"},
    {"keras", "lightning", "transformers"},
    {"tools", "jobs", "search", "virtual", "views", "sim", "install"},
    {"engines"},
    {"bench", "cli"} | {"cluster", "ray", "spark"},
)
"""Rooms, each of which may import those of lower levels, of its own level and nothing above."""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


@cache
def modules() -> dict[str, set[str]]:
    """Each module of the package with those that it imports, in functions too."""
    paths = {name_of(path): path for path in PACKAGE.rglob("*.py")}
    found = {}
    for name, path in paths.items():
        targets = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                targets |= {each if each in paths else node.module for each in full}
            elif isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
        found[name] = {each for each in targets if each in paths} - {name}
    return found


def room(module: str) -> str:
    parts = module.split(".")
    inside = len(parts) > 2 or (PACKAGE / parts[-1] / "__init__.py").is_file()
    return parts[1] if inside and len(parts) > 1 else ""


def test_a_room_imports_only_rooms_below_it():
    level = {name: number for number, names in enumerate(LEVELS) for name in names}
    assert {room(name) for name in modules()} == set(level)
    against = [
        f"{name} imports {target}"
        for name, targets in modules().items()
        for target in targets
        if level[room(target)] > level[room(name)]
    ]
    assert not against


def test_rooms_do_not_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {}
    for name, targets in modules().items():
        below = {room(target) for target in targets} - {room(name)}
        graph.setdefault(room(name), set()).update(below)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle of rooms: {' -> '.join(error.args[1])}") from None


@pytest.mark.parametrize("name", ["worker", "input", "script", "torch", "tensorflow", "leader"])
def test_modules_of_a_room_do_not_import_each_other_in_a_circle(name: str) -> None:
    """Imports for type checkers count as well."""
    inside = {module: targets for module, targets in modules().items() if room(module) == name}
    graph = {module: targets & set(inside) for module, targets in inside.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle of modules: {' -> '.join(error.args[1])}") from None

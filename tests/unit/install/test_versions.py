"""Versions of Python, frameworks and packages: what the settings admit, and what docs say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hvd_elastic.install import horovod_wheel, prerequisites

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def requirements() -> list[Requirement]:
    """All that pyproject.toml and pinned.txt name, with versions."""
    table = SETTINGS[: SETTINGS.index("[tool.")]
    texts = re.findall(r'"([A-Za-z][\w-]*(?:\[[\w,]+\])?[<>=!][^"]*)"', table)
    found = [Requirement(text) for text in texts]
    found += [
        Requirement(f"{found['name']}=={found['version']}")
        for found in prerequisites._requirements()
    ]
    return found


def advisories() -> list[tuple[str, SpecifierSet, str]]:
    """Package, affected versions, and name of each known hole."""
    lines = (ROOT / "tests/unit/advisories.txt").read_text(encoding="utf-8").splitlines()
    fields = [line.split(maxsplit=3) for line in lines if not line.startswith("#")]
    return [(name, SpecifierSet(affected), advisory) for name, affected, advisory, _ in fields]


def oldest(versions: SpecifierSet) -> Version:
    """The version at which a range begins."""
    bounds = [Version(one.version) for one in versions if one.operator in (">=", "==")]
    return max(bounds, default=Version("0"))


def known_hole(requirement: Requirement) -> str | None:
    """A hole that a version has which this requirement admits."""
    for name, affected, advisory in advisories():
        # where two ranges have versions in common, the later of their begins is one
        begin = max(oldest(requirement.specifier), oldest(affected))
        if name == requirement.name and begin in affected and begin in requirement.specifier:
            return f"{requirement} admits {begin}: {advisory}"
    return None


def test_no_version_with_a_known_hole_is_admitted():
    assert {"torch", "cryptography", "setuptools", "wheel"} <= {one.name for one in requirements()}
    assert [hole for one in requirements() if (hole := known_hole(one))] == []


@pytest.mark.parametrize(
    "text",
    ["torch>=2.2,<2.15", "torch>=2.6", "keras>=3.12.3,!=3.13.*,<4", "pip==26.1", "ray>=2.52"],
)
def test_a_version_with_a_known_hole_is_found(text):
    assert known_hole(Requirement(text))


# --- the table of versions in the manual ----------------------------------------------------------


def table() -> dict[str, list[str]]:
    """The table of docs/install.md: what is tried, should work, is refused, by name."""
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 4 and not set(row[0]) <= set("- ")}


def named(text: str) -> list[str]:
    """The versions that a cell names.

    >>> named("2.10 to 2.14, in `cuda-nvcc-12-…`")
    ['2.10', '2.14']
    """
    return re.findall(r"\d+\.\d+(?:\.\d+)?|(?<![\d.-])\d+(?![\d.-])", re.sub("`.*?`", "", text))


def admitted(name: str) -> SpecifierSet:
    if name == "Python":
        return SpecifierSet(re.findall(r'requires-python = "(.*)"', SETTINGS)[0])
    distribution = {"PyTorch": "torch", "TensorFlow": "tensorflow-cpu"}.get(name, name.lower())
    return next(one.specifier for one in requirements() if one.name == distribution)


@pytest.mark.parametrize("name", ["Python", "PyTorch", "TensorFlow", "Keras"])
def test_the_table_of_versions_says_what_the_settings_admit(name):
    tried, should_work, refused = table()[name]
    specifier = admitted(name)
    assert named(tried)
    for version in named(tried) + named(should_work):
        assert version in specifier, version
    bounds = [Version(one.version) for one in specifier if one.operator in ("<", ">=")]
    assert set(bounds) & {Version(version) for version in named(tried + should_work + refused)}
    for version in re.findall(r"before ([\d.]+)", refused):
        assert Version(version).release[:2] == oldest(specifier).release[:2]
    for version in re.findall(r"([\d.]+) and later", refused):
        assert version not in specifier


def test_every_python_that_is_admitted_is_in_the_table():
    tried, should_work, _ = table()["Python"]
    minors = {f"3.{minor}" for minor in range(30) if f"3.{minor}" in admitted("Python")}
    assert minors == set(named(tried) + named(should_work))


def test_what_make_installs_is_in_the_table_as_tried():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for setting, name in (("TORCH", "PyTorch"), ("TENSORFLOW", "TensorFlow")):
        version = re.findall(rf"^{setting} +\?= .*==(\d+\.\d+)", makefile, re.MULTILINE)
        assert version[0] in named(table()[name][0])
    assert horovod_wheel.PIP_CUDA in table()["CUDA of PyTorch"][0]

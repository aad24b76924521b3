"""Build description of hvd_elastic; tool settings are in pyproject.toml.

Horovod is in no list here: its newest source release does not compile unpatched, so
``make horovod`` (``scripts/build_horovod.py``) builds and installs it.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def version() -> str:
    """The version, read from the package's text: importing it here would need its dependencies."""
    text = (HERE / "hvd_elastic" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise SystemExit('setup.py: no line __version__ = "…" in hvd_elastic/__init__.py')
    return found.group(1)


def long_description() -> str:
    """The README, when it is there (a partial copy of the tree still installs)."""
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


CORE = [
    "fabric>=3.2",
    "msgspec>=0.19",
    "numpy>=1.26,<3",
    "packaging>=23",
    "paramiko>=3.4",
    "platformdirs>=4",
    "psutil>=5.9",
    "rich>=13",
    "typer>=0.12",
]

EXTRAS = {
    # The upper bound is what the Horovod patch is known to compile against (C++17).
    "torch": ["torch>=2.2,<2.15"],
    # On a GPU machine install `tensorflow` of the same version instead.
    "tensorflow": ["tensorflow-cpu>=2.21,<2.22", "keras>=3.10,<4"],
    "spark": ["pyspark>=3.5,<5", "pandas>=2.2", "pyarrow>=15"],
    "ray": ["ray[data,train]>=2.50,<3"],
    "dashboard": [
        "starlette>=0.40",
        "uvicorn>=0.30",
        "prometheus-client>=0.20",
        "textual>=1",
    ],
    # `hvd-elastic run --tensorboard`
    "tensorboard": ["tensorboard>=2.15"],
    # --checkpoint-dir URL; each backend has a package of its own: s3fs, gcsfs, adlfs
    "checkpoint": ["fsspec>=2024.2"],
    # for scripts that use it beside Horovod, under `hvd-elastic run --mpi`
    "mpi": ["mpi4py>=4,<5"],
    "dev": [
        "fsspec>=2024.2",
        "hypothesis>=6.115",
        "mpi4py>=4,<5",
        "mypy>=1.11",
        # datasets_prep/imagenet_layout.py and the example that trains on it
        "pillow>=10.1",
        "pytest>=8.3",
        "pytest-rerunfailures>=16.7",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "ruff>=0.8",
        # the demo and the tests train on its digits
        "scikit-learn>=1.4",
        # the tests read back what is written for it
        "tensorboard>=2.15",
        "types-psutil",
    ],
}

setup(
    name="hvd-elastic",
    version=version(),
    description="Elastic, goodput-driven data-parallel training on Horovod",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["hvd_elastic", "hvd_elastic.*"]),
    package_data={"hvd_elastic": ["py.typed", "**/*.html", "**/*.js", "**/*.css", "**/*.sh"]},
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            "hvd-elastic = hvd_elastic.cli.start:hvd_elastic",
            "runclust = hvd_elastic.cli.start:runclust",
            "copyclust = hvd_elastic.cli.start:copyclust",
            "killclust = hvd_elastic.cli.start:killclust",
            "checkclust = hvd_elastic.cli.start:checkclust",
            "virtclust = hvd_elastic.cli.start:virtclust",
        ]
    },
    zip_safe=False,
)

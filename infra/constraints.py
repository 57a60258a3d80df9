"""Print the packages of this environment as the lines of constraints.txt.

It leaves out s3cache itself, pip's own tools, and the CUDA packages that some builds of torch need
(torch pins those itself).
"""

from __future__ import annotations

from importlib.metadata import Distribution, distributions

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

HEADER = """\
# The exact versions that `make setup` installs and CI tests with.
#
# They live here and not in pyproject.toml because s3cache is a library: a user's environment
# already holds a torch and a botocore, so the package itself asks for ranges. torch is named
# without a local version (+cpu, +cu130): either build will do.
#
# To refresh: infra/constraints.sh
"""

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]  # as requires-python in pyproject.toml
OWN = {"torch-s3cache", "pip", "setuptools", "wheel"}
CUDA = ("cuda-", "nvidia-", "triton")


def constraint(distribution: Distribution) -> str:
    """Return ``name==version``, with a marker if the version does not support every Python."""
    name = canonicalize_name(distribution.metadata["Name"])
    pin = f"{name}=={Version(distribution.version).public}"
    wanted = SpecifierSet(str(distribution.metadata.json.get("requires_python", "")))
    # Compare the last patch release of each Python: "!=3.9.0" excludes only the first.
    oldest = next(python for python in PYTHONS if wanted.contains(f"{python}.99"))
    return pin if oldest == PYTHONS[0] else f'{pin}; python_version >= "{oldest}"'


def main() -> None:
    names = {canonicalize_name(d.metadata["Name"]): d for d in distributions()}
    print(HEADER, end="")  # noqa: T201
    for name in sorted(names):
        if name not in OWN and not name.startswith(CUDA):
            print(constraint(names[name]))  # noqa: T201


if __name__ == "__main__":
    main()

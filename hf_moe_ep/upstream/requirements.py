"""Compare the installed versions of other packages with the allowed ranges.

The ranges are defined only in setup.cfg, and read from the metadata of the installed hf_moe_ep.
Examples of problems:

    transformers 5.10.0, allowed >=5.16.1,<6   too old
    transformers 6.1.0                         too new
    peft, required by the extra "peft"         missing, which matters only for LoRA

Versions are read without importing the packages, so this also works for a package whose import
fails. If a version is outside its range, `patch` warns and continues, and `hf-moe-ep doctor`
(doctor.py) reports a failure.

`packaging` is imported when ranges are compared, because `hf-moe-ep run` imports this module in
each process that loads a model.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

DISTRIBUTION = "hf_moe_ep"
# The reasons why versions outside of a range are not allowed, by `AllowedPackage.problem`.
_WHY = {"too old": "older versions are not tested", "too new": "newer versions are not tested"}
# Packages with a more precise reason why older versions are not allowed.
_WHY_NOT_OLDER = {
    "transformers": "older versions are not tested, and their experts may lack is_concatenated",
    "bitsandbytes": "older versions quantise to other values on a CPU",
}
# The extras whose packages are used in training; "" stands for the packages without an extra.
_FOR_TRAINING = ("", "peft", "trl", "quant")


@dataclass(frozen=True)
class AllowedPackage:
    """A package in our metadata, and the extra that requires it ("" if it is always required)."""

    name: str
    versions: SpecifierSet
    extra: str = ""

    def problem(self, version: str | None) -> str:
        """Return "missing", "too old", "too new", or "" for a version in the range."""
        from packaging.specifiers import SpecifierSet

        if version is None:
            return "missing"
        if self.versions.contains(version, prereleases=True):
            return ""
        minimum = SpecifierSet(",".join(str(s) for s in self.versions if s.operator[0] in ">~="))
        return "too new" if minimum.contains(version, prereleases=True) else "too old"

    def sentence(self, version: str | None) -> str:
        """Return a problem, the allowed range, the reason and the fix, or "" without a problem."""
        problem = self.problem(version)
        subject = "" if version is None else f"{version} is "
        reason = _WHY.get(problem, "")
        if problem == "too old":
            reason = _WHY_NOT_OLDER.get(self.name, reason)
        allowed = (self.range or "any") + (reason and f" ({reason})")
        fix = f"pip install {self.for_pip}"
        return problem and f"{subject}{problem}, allowed is {allowed}: {fix}"

    @property
    def for_pip(self) -> str:
        """The argument for `pip install`, quoted for a shell."""
        return f"'{self.name}{self.range}'" if self.range else self.name

    @property
    def range(self) -> str:
        """The allowed range, with its lower end first: >=5.16.1,<6."""
        return ",".join(sorted(map(str, self.versions), reverse=True))


def list_allowed_packages() -> list[AllowedPackage] | None:
    """List the packages in hf_moe_ep's metadata that apply to this Python.

    Returns None if hf_moe_ep is not installed, and so has no metadata.
    """
    from packaging.requirements import Requirement

    try:
        our_metadata = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
    extras = ("", *(our_metadata.get_all("Provides-Extra") or ()))
    packages: dict[str, AllowedPackage] = {}
    for line in metadata.requires(DISTRIBUTION) or ():
        requirement = Requirement(line)
        for extra in extras:
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                package = AllowedPackage(requirement.name, requirement.specifier, extra)
                packages.setdefault(requirement.name, package)
                break
    return list(packages.values())


def warn_of_versions() -> None:
    """Warn of each installed package whose version is outside its range."""
    for problem in list_version_problems():
        warnings.warn(problem, stacklevel=3)


@functools.cache  # reading the metadata of all packages takes more time than the rest of `patch`
def list_version_problems() -> tuple[str, ...]:
    """List the installed packages whose version is outside its range, a sentence for each."""
    versions = [
        (package, get_installed_version(package.name))
        for package in list_allowed_packages() or ()
        if package.extra in _FOR_TRAINING
    ]
    return tuple(
        f"{package.name} {problem}"
        for package, version in versions
        if version is not None and (problem := package.sentence(version))
    )


def get_installed_version(name: str) -> str | None:
    """Return the version in a package's metadata, or None if the package is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

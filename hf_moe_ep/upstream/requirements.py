"""Which versions of other packages we allow, and which are there.

The allowed ranges stand once, in setup.cfg; an installed package carries them in its metadata, and
they are read from there:

    transformers 5.10.0, allowed >=5.16.1,<6   too old
    transformers 6.1.0                         too new
    peft, of the extra of that name            missing, which only LoRA minds

Nothing is imported to find a version: a package that is broken still has one. `patch` warns of a
version outside its range and goes on, `hf-moe-ep doctor` (tools/doctor.py) calls it a failure.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

DISTRIBUTION = "hf_moe_ep"
# The extras whose packages run with a model, "" for what is always required.
_WITH_A_MODEL = ("", "peft", "trl", "quant")


@dataclass(frozen=True)
class Allowed:
    """One package that we declare; `extra` is the one that asks for it, "" where it is always."""

    name: str
    versions: SpecifierSet
    extra: str = ""

    def problem(self, version: str | None) -> str:
        """Return "missing", "too old", "too new", or "" for a version in the range."""
        if version is None:
            return "missing"
        if self.versions.contains(version, prereleases=True):
            return ""
        lower = SpecifierSet(",".join(str(s) for s in self.versions if s.operator[0] in ">~="))
        return "too new" if lower.contains(version, prereleases=True) else "too old"

    def sentence(self, version: str | None) -> str:
        """Say which version is there and which are allowed; "" for a version in the range."""
        problem = self.problem(version)
        found = "" if version is None else f"{version} is "
        fix = f"pip install {self.for_pip}"
        return problem and f"{found}{problem}, allowed is {self.range or 'any'}: {fix}"

    @property
    def for_pip(self) -> str:
        """The argument for `pip install`, quoted for a shell."""
        return f"'{self.name}{self.range}'" if self.range else self.name

    @property
    def range(self) -> str:
        """The versions in the order in which one says them: >=5.16.1,<6."""
        return ",".join(sorted(map(str, self.versions), reverse=True))


def allowed_packages() -> list[Allowed] | None:
    """Read what the installed hf_moe_ep declares for this Python and system, None without one."""
    try:
        found = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
    extras = ("", *(found.get_all("Provides-Extra") or ()))
    packages: dict[str, Allowed] = {}
    for line in metadata.requires(DISTRIBUTION) or ():
        wanted = Requirement(line)
        for extra in extras:
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                package = Allowed(wanted.name, wanted.specifier, extra)
                packages.setdefault(wanted.name, package)
                break
    return list(packages.values())


def warn_of_versions() -> None:
    """Warn, in one sentence each, of installed packages whose version is outside its range."""
    for package in allowed_packages() or ():
        version = installed_version(package.name)
        if version is None or package.extra not in _WITH_A_MODEL:
            continue
        if said := package.sentence(version):
            warnings.warn(f"{package.name} {said}", stacklevel=3)


def installed_version(name: str) -> str | None:
    """Read a package's version from its metadata; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

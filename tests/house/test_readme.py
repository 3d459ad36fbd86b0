"""The README is short, and every test it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_readme_is_plain() -> None:
    assert README.isascii()
    assert "@@" not in README, "a figure is still to be filled in"


def test_readme_names_only_what_exists() -> None:
    names = set(re.findall(r"`((?:examples|benchmarks|notebooks|hf_moe_ep)/[\w./]*)`", README))
    assert len(names) > 3
    missing = [name for name in names if not (ROOT / name).exists()]
    assert not missing, f"README names {missing}"

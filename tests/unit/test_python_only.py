"""What of a Debian ends up in the operator's image."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "images/operator"))

import python_only  # noqa: E402

pytestmark = pytest.mark.unit

LISTS = dict.fromkeys(python_only.PACKAGES, "/.\n/usr\n") | {
    "libc6": "/lib/x86_64-linux-gnu/libc.so.6\n/usr/share/doc/libc6/copyright\n",
    "python3.11-minimal": "/usr/bin/python3.11\n",
    "python3.11": "/usr/bin/pdb3.11\n",
    "dash": "/bin/dash\n/bin/sh\n",
}


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("usr/lib/x86_64-linux-gnu/libc.so.6", True),  # /lib is a link into /usr
        ("lib", True),
        ("usr/bin/python3.11", True),
        ("usr/lib/python3.11/__pycache__/os.cpython-311.pyc", True),
        ("etc/ssl/certs/ca-certificates.crt", True),
        ("usr/bin/pdb3.11", False),
        ("usr/share/doc/libc6/copyright", False),
        ("usr/bin/dash", False),
        ("usr/bin/sh", False),
        ("var/lib/dpkg/info/libc6:amd64.list", False),
    ],
)
def test_python_and_what_it_needs_is_kept(path: str, kept: bool) -> None:
    assert python_only.keeper(LISTS)(path) is kept


def test_a_root_file_system_without_a_package_is_refused() -> None:
    with pytest.raises(python_only.MissingError, match="has no package libc6"):
        python_only.keeper({name: text for name, text in LISTS.items() if name != "libc6"})


def test_the_record_names_kept_packages_only() -> None:
    assert python_only.package_of("var/lib/dpkg/info/libc6:amd64.list") == "libc6"
    assert python_only.package_of("var/lib/dpkg/info/libc6:amd64.md5sums") == ""
    status = "Package: apt\nVersion: 2\n\nPackage: libc6\nVersion: 2.36\n\n"
    assert python_only.status_of(status) == "Package: libc6\nVersion: 2.36\n\n"

"""Several hosts on one machine: network namespaces of Linux, joined by pairs of virtual cables."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

#: Addresses of this machine and of the first host on the cable between them, of the two hosts on the other one: of
#: networks that are for documentation (RFC 5737).
OUTSIDE, FIRST_OUTSIDE = "198.51.100.1", "198.51.100.2"
FIRST, SECOND = "203.0.113.1", "203.0.113.2"


@dataclass(frozen=True, kw_only=True)
class Host:
    """A namespace with an address on the cable between both hosts, by which it knows itself."""

    name: str
    address: str
    names: Path

    def command(self, command: Sequence[str]) -> list[str]:
        """``command``, to be run there: where its own name is that address, as on a machine of its own."""
        own = f'mount --bind "{self.names}" /etc/hosts && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--mount", "sh", "-c", own, "sh", *command]

    def cut(self) -> None:
        """Pull the cable between both hosts."""
        _ip("-n", self.name, "link", "set", "between", "down")

    def join(self) -> None:
        """Plug it in again."""
        _ip("-n", self.name, "link", "set", "between", "up")


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts; the first one is reached from here at ``FIRST_OUTSIDE``. Skips the test where there can be none."""
    if os.geteuid() or any(shutil.which(tool) is None for tool in ("ip", "unshare", "mount")):
        pytest.skip("network namespaces are for root, and take iproute2 and util-linux")
    names = [f"rooftop-{os.getpid()}-{number}" for number in (1, 2)]
    cable = f"rt{os.getpid()}"
    hosts = list[Host]()
    with ExitStack() as stack:
        # The addresses on this machine's end are the same for all who run tests at the same time: they take turns.
        turn = stack.enter_context((Path(tempfile.gettempdir()) / "rooftop-hosts.lock").open("w"))
        fcntl.flock(turn, fcntl.LOCK_EX)
        stack.callback(_remove, cable, names)
        try:
            for name, address in zip(names, (FIRST, SECOND), strict=True):
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
                hosts.append(Host(name=name, address=address, names=folder / f"{name}.hosts"))
                hosts[-1].names.write_text(f"127.0.0.1 localhost\n{address} {os.uname().nodename}\n")
            _ip("link", "add", "between", "netns", names[0], "type", "veth", "peer", "between", "netns", names[1])
            for host in hosts:
                _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "between")
                host.join()
            _ip("link", "add", cable, "type", "veth", "peer", "outside", "netns", names[0])
            _ip("address", "add", f"{OUTSIDE}/24", "dev", cable)
            _ip("link", "set", cable, "up")
            _ip("-n", names[0], "address", "add", f"{FIRST_OUTSIDE}/24", "dev", "outside")
            _ip("-n", names[0], "link", "set", "outside", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield hosts[0], hosts[1]


def _remove(cable: str, names: Sequence[str]) -> None:
    with suppress(subprocess.CalledProcessError):
        _ip("link", "delete", cable)
    for name in names:
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

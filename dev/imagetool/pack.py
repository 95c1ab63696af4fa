"""Packs a layer into a registry while it is being made: tar and zstd run as a stream, nothing is stored on the way."""

from __future__ import annotations

import hashlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO

from .layers import Entry, write_tar
from .registry import Registry

LAYER = "application/vnd.oci.image.layer.v1.tar+zstd"
LEVEL = 3  # level 1 is 2 s faster on the largest layer, 9 % larger
BLOCK = 1 << 20
TELL_S = 10.0  # seconds between progress lines


@dataclass(frozen=True)
class Layer:
    """A stored layer: digest and size in bytes of the packed blob, digest and size of the tar inside."""

    digest: str
    size: int
    diff_id: str
    unpacked: int


class _Tee:
    """Hashes and counts what it passes on."""

    def __init__(self, out: IO[bytes] | None = None) -> None:
        self.hash, self.size, self._out = hashlib.sha256(), 0, out

    def write(self, data: bytes) -> None:
        self.hash.update(data)
        self.size += len(data)
        if self._out is not None:
            self._out.write(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self.hash.hexdigest()}"


def push_layer(registry: Registry, repo: str, entries: Iterable[Entry], say: Callable[[str], None]) -> Layer:
    """Packs entries and stores the layer in `repo`, telling how far it is. Raises RegistryError or an entry's error."""
    # The number of threads does not change zstd's output, as long as it is not a single-threaded run.
    command = ["zstd", "-q", f"-{LEVEL}", "-T2", "-c"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as zstd:
        assert zstd.stdin is not None
        assert zstd.stdout is not None
        tar, packed = _Tee(zstd.stdin), _Tee()
        failures: list[BaseException] = []

        def produce() -> None:
            assert zstd.stdin is not None
            try:
                write_tar(entries, tar)
            except BaseException as error:
                failures.append(error)
            finally:
                zstd.stdin.close()

        def chunks() -> Iterator[bytes]:
            assert zstd.stdout is not None
            told = time.monotonic()
            while block := zstd.stdout.read(BLOCK):
                packed.write(block)
                yield block
                if time.monotonic() - told > TELL_S:
                    told = time.monotonic()
                    say(f"  {tar.size / 1e6:.0f} MB packed to {packed.size / 1e6:.0f} MB")
            producer.join()
            if failures:
                raise failures[0]

        producer = threading.Thread(target=produce, daemon=True)
        producer.start()
        try:
            registry.push_stream(repo, chunks(), lambda: packed.digest)
        except BaseException as error:
            zstd.kill()
            # A producer that failed is the cause; the broken upload only its effect.
            cause = failures[0] if failures and not isinstance(failures[0], BrokenPipeError) else error
            raise cause from (error if cause is not error else None)
    return Layer(packed.digest, packed.size, tar.digest, tar.size)

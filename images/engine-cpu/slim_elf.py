"""Makes a shared library smaller without changing what a process on a CPU sees of it.

Two things go: everything the loader never maps (symbol tables, debug sections), and device code. Device code (CUDA
"fat binaries", up to 90 % of such a library) is data for a GPU's driver; on a machine without one nobody reads it. Its
address range stays, as zero pages that take no room in the file: all other addresses remain what they were.
Pages that the loader itself writes to (relocations) are kept.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

PAGE = 4096
LEAST = 256 * PAGE  # a hole smaller than 1 MiB is not worth a program header
DEVICE_SECTIONS = (".nv_fatbin", "__nv_relfatbin", ".cask_resource")
FATBIN_MAGIC = b"\x50\xed\x55\xba"
PT_LOAD, PT_NOTE, PT_PHDR, SHT_NOBITS, SHT_RELA, SHT_RELR, SHF_ALLOC = 1, 4, 6, 8, 4, 19, 2
_EHDR, _PHDR, _SHDR = struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQQQ"), struct.Struct("<IIQQQQIIQQ")


@dataclass(frozen=True)
class Segment:
    """A program header; offsets and sizes in bytes."""

    kind: int
    flags: int
    offset: int
    vaddr: int
    filesz: int
    memsz: int
    align: int

    def pack(self) -> bytes:
        return _PHDR.pack(
            self.kind, self.flags, self.offset, self.vaddr, self.vaddr, self.filesz, self.memsz, self.align
        )


@dataclass(frozen=True)
class Section:
    """A section header with its name; offset and size in bytes."""

    name: str
    kind: int
    flags: int
    addr: int
    offset: int
    size: int


class NotSlimmableError(ValueError):
    """The file is not a 64-bit little-endian shared library that this module understands."""


def segments_of(elf: bytes | memoryview) -> list[Segment]:
    """The program headers, in order. Raises NotSlimmableError for anything but ELF64 little-endian."""
    if bytes(elf[:6]) != b"\x7fELF\x02\x01":
        raise NotSlimmableError("not a 64-bit little-endian ELF file")
    header = _EHDR.unpack_from(elf)
    start, size, count = header[5], header[9], header[10]
    if size != _PHDR.size:
        raise NotSlimmableError("unexpected size of program headers")
    rows = (_PHDR.unpack_from(elf, start + i * size) for i in range(count))
    return [Segment(kind, flags, off, va, fs, ms, al) for kind, flags, off, va, _, fs, ms, al in rows]


def sections_of(elf: bytes | memoryview) -> list[Section]:
    """The section headers with their names; empty when the file has none."""
    header = _EHDR.unpack_from(elf)
    start, size, count, names = header[6], header[11], header[12], header[13]
    rows = [_SHDR.unpack_from(elf, start + i * size) for i in range(count)]
    if not rows:
        return []
    strings = bytes(elf[rows[names][4] : rows[names][4] + rows[names][5]])
    return [Section(strings[r[0] : strings.index(b"\0", r[0])].decode(), r[1], r[2], r[3], r[4], r[5]) for r in rows]


def relocated(elf: bytes | memoryview, sections: Iterable[Section]) -> list[int]:
    """Sorted addresses that the loader writes to."""
    found: list[int] = []
    for section in sections:
        body = elf[section.offset : section.offset + section.size]
        if section.kind == SHT_RELA and section.flags & SHF_ALLOC:
            found += [row[0] for row in struct.iter_unpack("<QQq", body)]
        elif section.kind == SHT_RELR:
            found += _relr(word for (word,) in struct.iter_unpack("<Q", body))
    return sorted(found)


def _relr(words: Iterable[int]) -> Iterator[int]:
    at = 0
    for word in words:
        if word & 1:
            yield from (at + 8 * bit for bit in range(63) if word >> (bit + 1) & 1)
            at += 8 * 63
        else:
            yield word
            at = word + 8


def holes(elf: bytes | memoryview, sections: list[Section], marks: list[int]) -> list[tuple[int, int]]:
    """Page-aligned address ranges [start, end) of device code that hold no relocation, each at least LEAST long."""
    result = []
    for section in sections:
        if section.kind == SHT_NOBITS or not section.flags & SHF_ALLOC or section.size < LEAST:
            continue
        if section.name not in DEVICE_SECTIONS and not _is_fat_data(elf, section):
            continue
        first, last = bisect_left(marks, section.addr - 8), bisect_left(marks, section.addr + section.size)
        # A relocation writes 8 bytes: keep the page it starts in and the page it ends in.
        edges = [
            section.addr,
            *(m for mark in marks[first:last] for m in (mark, mark + 8)),
            section.addr + section.size,
        ]
        for low, high in pairwise(edges):
            start, end = -(-low // PAGE) * PAGE, high // PAGE * PAGE
            if end - start >= LEAST:
                result.append((start, end))
    return sorted(result)


def _is_fat_data(elf: bytes | memoryview, section: Section) -> bool:
    """Some libraries keep their device code in the large-model data section, next to tables that point into it."""
    return (
        section.name == ".ldata"
        and bytes(elf[section.offset : section.offset + section.size]).count(FATBIN_MAGIC) > 999
    )


def slim(elf: bytes | memoryview) -> bytes:
    """The smaller library. Raises NotSlimmableError when the file is no such library; never returns a larger file."""
    segments, sections = segments_of(elf), sections_of(elf)
    cut = holes(elf, sections, relocated(elf, sections))
    out = bytearray()
    moved: list[Segment] = []  # the pieces of PT_LOAD segments at their new offsets
    for segment in segments:
        if segment.kind != PT_LOAD:
            continue
        for piece in _split(segment, cut):
            if not piece.filesz:
                moved.append(replace(piece, offset=piece.vaddr % PAGE, align=PAGE))
                continue
            out += bytes((piece.vaddr - len(out)) % PAGE)
            moved.append(replace(piece, offset=len(out), align=PAGE))
            out += elf[piece.offset : piece.offset + piece.filesz]
    headers = []
    rest = iter(moved)
    for segment in segments:
        if segment.kind == PT_LOAD:
            headers += [next(rest) for _ in _split(segment, cut)]
        elif segment.kind == PT_PHDR or (segment.kind == PT_NOTE and _home(segment, moved) is None):
            continue  # the table moves out of the mapped part: the loader then reads it from the file
        elif segment.filesz:
            home = _home(segment, moved)
            if home is None:
                raise NotSlimmableError(f"a program header of kind {segment.kind:#x} lies outside the mapped part")
            headers.append(replace(segment, offset=home.offset + segment.vaddr - home.vaddr))
        else:
            headers.append(segment)
    # On a page of its own: on a mapped page glibc would use the mapped table, which zeroing .bss may have wiped.
    out += bytes(-len(out) % PAGE)
    table = len(out)
    out += b"".join(header.pack() for header in headers)
    fields = list(_EHDR.unpack_from(elf))
    fields[5], fields[6], fields[10], fields[12], fields[13] = table, 0, len(headers), 0, 0
    _EHDR.pack_into(out, 0, *fields)
    return bytes(out) if len(out) < len(elf) else bytes(elf)


def _split(segment: Segment, cut: list[tuple[int, int]]) -> list[Segment]:
    """A PT_LOAD segment as file-backed pieces with zero-filled ones where the holes are."""
    pieces, at, end = [], segment.vaddr, segment.vaddr + segment.filesz

    def piece(start: int, filesz: int, memsz: int) -> Segment:
        return replace(segment, offset=segment.offset + start - segment.vaddr, vaddr=start, filesz=filesz, memsz=memsz)

    for low, high in cut:
        if at < low and high <= end:
            pieces += [piece(at, low - at, low - at), piece(low, 0, high - low)]
            at = high
    last = piece(at, end - at, segment.vaddr + segment.memsz - at)
    return [*pieces, last] if last.memsz or not pieces else pieces


def _home(segment: Segment, loads: list[Segment]) -> Segment | None:
    """The piece that holds a program header's bytes."""
    fits = (s for s in loads if s.vaddr <= segment.vaddr and segment.vaddr + segment.filesz <= s.vaddr + s.filesz)
    return next(fits, None)

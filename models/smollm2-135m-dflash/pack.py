"""Drafter weights in one small GGUF file: matrices Q5_1, norms F32.

usage: pack.py pack DRAFTER_FOLDER OUT.gguf | unpack IN.gguf CONFIG.json DRAFTER_FOLDER
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dflash import Shape, write_drafter


def pack(folder: Path, out: Path) -> None:
    writer = GGUFWriter(str(out), "dflash-draft")
    writer.add_string("general.license", "apache-2.0")
    writer.add_string("general.name", "smollm2-135m-dflash")
    for name, tensor in load_file(folder / "model.safetensors").items():
        array = tensor.float().numpy()
        if array.ndim == 2:
            kind = GGMLQuantizationType.Q5_1
            writer.add_tensor(name, quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a GGUF file in float32, by name."""
    out = {}
    for tensor in GGUFReader(str(path)).tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        plain = tensor.tensor_type == GGMLQuantizationType.F32
        array = tensor.data if plain else quants.dequantize(tensor.data, tensor.tensor_type)
        out[tensor.name] = torch.tensor(np.ascontiguousarray(array, dtype=np.float32)).reshape(shape)
    return out


def unpack(path: Path, config: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(config, folder / "config.json")
    write_drafter(folder, Shape.read(folder), read(path))


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    {"pack": pack, "unpack": unpack}[command](*map(Path, paths))

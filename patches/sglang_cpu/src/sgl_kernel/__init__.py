"""Stand-in for the CPU build of ``sgl_kernel``, which is not published: the operators that SGLang 0.5.23 imports by
name on a CPU, in plain torch. It serves dense models with torch_native attention; what such a model never calls
raises.

It tests the callers of these operators, not SGLang's own C++ ones.
"""

from __future__ import annotations

import ctypes
from typing import Any, NoReturn

import torch

__version__ = "0.0.0+sglang.cpu.shim"


def _unavailable(name: str) -> Any:
    def operator(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not available on a CPU with sglang-cpu")

    operator.__name__ = name
    return operator


def _ranges(start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of the cells [start, end) of every row, row by row."""
    lengths = (end - start).long()
    rows = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    first = torch.cumsum(lengths, 0) - lengths
    columns = torch.arange(int(lengths.sum())) - first[rows] + start.long()[rows]
    return rows, columns


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """``req_to_token[request, start:end] = out_cache_loc``, the locations packed request by request."""
    rows, columns = _ranges(start, end)
    req_to_token[req_pool_indices.long()[rows], columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The other way round: ``out_cache_loc`` = the locations of [start, end) of every request, packed."""
    rows, columns = _ranges(start, end)
    out_cache_loc[: rows.numel()] = req_to_token[req_pool_indices.long()[rows], columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Locations of ``topk * num_steps`` columns after every request's sequence."""
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, seq_lens + topk * num_steps, out_cache_loc, pool_len
    )


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, stride: int
) -> None:
    """The last accepted token of every row of width ``stride``."""
    rows = torch.arange(accept_lens.numel(), dtype=torch.int64)
    bonus_tokens.copy_(accept_tokens.reshape(-1)[rows * stride + accept_lens.long() - 1])


def fill_accept_out_cache_loc_cpu(accept_index: torch.Tensor, out_cache_loc: torch.Tensor, out: torch.Tensor) -> None:
    """Locations of the accepted nodes, packed; -1 marks an unused entry."""
    accepted = accept_index.reshape(-1)
    accepted = accepted[accepted >= 0].long()
    out[: accepted.numel()] = out_cache_loc[accepted]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy KV slots in every buffer. ``data_ptrs``: addresses; ``strides``: bytes a slot. Reads all before it
    writes."""
    if tgt_loc.numel() == 0:
        return
    target, source = tgt_loc.long(), src_loc.long()
    slots = int(torch.maximum(target.max(), source.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        raw = (ctypes.c_uint8 * (slots * stride)).from_address(address)
        rows = torch.frombuffer(raw, dtype=torch.uint8).view(slots, stride)
        rows[target] = rows[source]


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk every tree from its root along the target's greedy tokens (NGRAM's verify). All index tensors [bs, nodes];
    writes the predicted token of every visited node, the visited nodes' flat indices and their number less one."""
    bs = candidates.shape[0]
    wanted = target_predict.reshape(-1).tolist()
    tokens, index = candidates.tolist(), retrive_index.tolist()
    child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for row in range(bs):
        path, node = [index[row][0]], 0
        while len(path) < accept_index.shape[1]:
            want = wanted[path[-1]]
            node = child[row][node]
            while node != -1 and tokens[row][node] != want:
                node = sibling[row][node]
            if node == -1:
                break
            path.append(index[row][node])
        for flat in path:
            predicts[flat] = wanted[flat]
        accept_index[row, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[row] = len(path) - 1


build_tree_kernel_efficient_cpu = _unavailable("build_tree_kernel_efficient_cpu")
rotate_input_ids_cpu = _unavailable("rotate_input_ids_cpu")

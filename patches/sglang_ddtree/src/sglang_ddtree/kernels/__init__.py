"""Triton kernels of DDTree: build the tree, write its mask, walk it, move the accepted KV.

Everything runs on the current stream, allocates nothing, never reads a tensor on the host, and takes its
shapes from tensor shapes alone, so every launch may be captured in a CUDA graph and replayed.
Under ``TRITON_INTERPRET=1`` the same code runs on CPU tensors.

Node order (shared with ``reference.py``): node 0 is the root (the last committed token). If the budget
holds the whole draft chain, nodes ``1..depth`` are that chain. The other nodes follow in the order a heap
would pop them: highest score first, equal scores by the lower parent index. A score is the float32 sum of
log-probabilities from the root down, added one level at a time.
"""

from sglang_ddtree.kernels.build import TreeBuffers, build_tree
from sglang_ddtree.kernels.kv_move import KVBuffers, move_accepted_kv
from sglang_ddtree.kernels.lse import log_sum_exp
from sglang_ddtree.kernels.mask import full_mask_cells, write_full_mask, write_packed_mask, write_qlen_mask
from sglang_ddtree.kernels.walk import WalkBuffers, tree_links, walk_tree

__all__ = [
    "KVBuffers",
    "TreeBuffers",
    "WalkBuffers",
    "build_tree",
    "full_mask_cells",
    "log_sum_exp",
    "move_accepted_kv",
    "tree_links",
    "walk_tree",
    "write_full_mask",
    "write_packed_mask",
    "write_qlen_mask",
]

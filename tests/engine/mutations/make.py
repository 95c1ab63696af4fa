# ruff: noqa: E501 (lines of patches)
"""Writes the faulty patches of this folder and the demo's faulty series from the sources as they are.

usage: make.py        run it after editing a line that a fault is about; a unit test says when
"""

from __future__ import annotations

import difflib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PACKAGE = ROOT / "patches/sglang_ddtree/src/sglang_ddtree"
STANDARD = ROOT / "patches/sglang-0.5.23"

Edit = tuple[str, str, str]  # file, what is there, what the fault makes of it

# name: (header, edits). A fault is put into plain torch and into Triton alike: one patch for a CPU's engine and a GPU's
FAULTS: dict[str, tuple[str, tuple[Edit, ...]]] = {
    "causal-mask": (
        "A fault for tests and the demo: every node sees all nodes before it, as in a chain.",
        (
            (
                "tree.py",
                "        seen.scatter_(2, at[:, :, None], True)\n    return seen\n",
                "        seen.scatter_(2, at[:, :, None], True)\n    return torch.ones_like(seen).tril()\n",
            ),
            (
                "kernels/mask.py",
                "        seen = seen | (at[:, None] == cols[None, :])\n    return seen\n",
                "        seen = seen | (at[:, None] == cols[None, :])\n    return cols[None, :] <= rows[:, None]\n",
            ),
        ),
    ),
    "no-grandparents": (
        "A fault for tests: a node sees itself and its parent, not what lies above.",
        (
            ("tree.py", "    for _ in range(depth):\n        up = ", "    for _ in range(1):\n        up = "),
            ("kernels/mask.py", "    for _ in range(0, DEPTH):\n", "    for _ in range(0, 1):\n"),
        ),
    ),
    "all-seen": (
        "A fault for tests: every node sees all nodes, whatever the mask says.",
        (
            (
                "tree.py",
                "        seen.scatter_(2, at[:, :, None], True)\n    return seen\n",
                "        seen.scatter_(2, at[:, :, None], True)\n    return torch.ones_like(seen)\n",
            ),
            (
                "kernels/attention.py",
                "                    seen = seen & here[None, :]\n",
                "                    seen = (seen | True) & here[None, :]\n",
            ),
        ),
    ),
    "chain-positions": (
        "A fault for tests: a node's position is its index, as in a chain, not its depth.",
        (
            (
                "worker.py",
                "            positions=tree.positions.reshape(-1),\n            draft_token_num=width,\n",
                "            positions=(tree.positions[:, :1] + torch.arange(width, device=tree.positions.device)).reshape(-1),\n"
                "            draft_token_num=width,\n",
            ),
        ),
    ),
    "no-move": (
        "A fault for tests: the accepted path's KV stays where the tree put it.",
        (
            (
                "ops.py",
                "        source, target = moves(window, accept_index)\n",
                "        return\n        source, target = moves(window, accept_index)\n",
            ),
            ("kernels/backend.py", "        move_accepted_kv(self._pool[1], window, accept_index)\n", ""),
        ),
    ),
    "wrong-slot": (
        "A fault for tests and the demo: the accepted path's KV goes one slot too far to the front.",
        (
            (
                "ops.py",
                "    target = slots[:, :steps][moved]\n",
                "    target = slots[:, :steps].roll(1, dims=1)[moved]\n",
            ),
            (
                "kernels/kv_move.py",
                "        target = tl.load(window + b * stride + slot, mask",
                "        target = tl.load(window + b * stride + (slot + D - 1) % D, mask",
            ),
        ),
    ),
    "draft-positions": (
        "A fault for tests: the drafter's KV of the path gets the root's position. Costs acceptance, not text.",
        (
            (
                "worker.py",
                "torch.arange(steps, device=prefix.device)).reshape(-1)",
                "torch.zeros(steps, dtype=torch.int64, device=prefix.device)).reshape(-1)",
            ),
        ),
    ),
    "path-uncounted": (
        "A fault for tests: penalties do not know of the drafts on a node's path.",
        (
            (
                "penalties.py",
                "    total = counts.gather(1, path.view(batch, -1)).view_as(path) + seen\n",
                "    total = counts.gather(1, path.view(batch, -1)).view_as(path) + seen * 0\n",
            ),
            (
                "kernels/penalties.py",
                "                count += tl.where((up >= 0) & (token == draft), 1, 0)\n",
                "                count += tl.where((up >= 0) & (token == draft), 0, 0)\n",
            ),
        ),
    ),
    "root-twice": (
        "A fault for tests: penalties count the root as output and once more as part of the path.",
        (
            (
                "penalties.py",
                "    total = counts.gather(1, path.view(batch, -1)).view_as(path) + seen\n",
                "    total = counts.gather(1, path.view(batch, -1)).view_as(path) + seen + (path == tokens[:, :1, None])\n",
            ),
            (
                "kernels/penalties.py",
                "            tl.debug_barrier()\n",
                "            count += tl.where(token == tl.load(tokens + b * Q), 1, 0)\n            tl.debug_barrier()\n",
            ),
        ),
    ),
    "counts-late": (
        "A fault for tests: the counts of a step arrive one step late, as SGLang's do with overlap scheduling.",
        (
            (
                "worker.py",
                "            penalties.count(batch.req_pool_indices, accepted.out_tokens, accepted.commit_lens)\n",
                "            late = getattr(self, '_late', None)\n"
                "            self._late = (batch.req_pool_indices, accepted.out_tokens, accepted.commit_lens)\n"
                "            if late is not None:\n"
                "                penalties.count(*late)\n",
            ),
        ),
    ),
    "dump-kv": (
        "No fault: writes the KV of a request after each of its steps, for test_kv.py.",
        (
            (
                "worker.py",
                "        self.tree_metrics.account(tree, accepted.accept_len, slots)\n        return accepted\n",
                "        self.tree_metrics.account(tree, accepted.accept_len, slots)\n"
                "        import hashlib\n"
                "        import os\n"
                "\n"
                "        asked = list(batch.reqs[0].origin_input_ids)\n"
                "        row = self.model_runner.req_to_token_pool.req_to_token[batch.req_pool_indices[0]]\n"
                "        kept = row[: int(accepted.new_seq_lens[0])].long()\n"
                "        pools = (self.model_runner.token_to_kv_pool, self.draft_model_runner.token_to_kv_pool)\n"
                "        kv = [torch.stack([b[kept] for b in (*p.k_buffer, *p.v_buffer)]) for p in pools]\n"
                "        name = hashlib.sha256(str(asked).encode()).hexdigest()[:16]\n"
                "        torch.save({'prefix': int(prefix[0]), 'kv': kv}, os.path.join(os.environ['DDTREE_TEST_DUMP'], name))\n"
                "        return accepted\n",
            ),
        ),
    ),
    "dump-paths": (
        "No fault: writes every request's accepted path, step by step, for test_steps.py.",
        (
            (
                "worker.py",
                "        self.tree_metrics.account(tree, accepted.accept_len, slots)\n        return accepted\n",
                "        self.tree_metrics.account(tree, accepted.accept_len, slots)\n"
                "        import json\n"
                "\n"
                "        with open(os.environ['DDTREE_TEST_DUMP'], 'a') as out:\n"
                "            for row, request in enumerate(batch.reqs):\n"
                "                path = [n - row * self.config.width for n in accepted.accept_index[row].tolist() if n >= 0]\n"
                "                out.write(json.dumps([list(request.origin_input_ids), path]) + '\\n')\n"
                "        return accepted\n",
            ),
        ),
    ),
}
# what a fault must come to: refused by the start-up check; another text, always or under penalties (which then differ is
# in test_penalties.py); the same text with fewer accepted drafts
MUST = {
    "causal-mask": "refused",
    "no-grandparents": "refused",
    "all-seen": "refused",
    "chain-positions": "refused",
    "no-move": "text",
    "wrong-slot": "text",
    "draft-positions": "slower",
    "path-uncounted": "penalised",
    "root-twice": "penalised",
    "counts-late": "penalised",
}
DEMO = {"wrong-mask": "causal-mask", "wrong-move": "wrong-slot"}


def patch(name: str) -> str:
    """The patch of a fault against the sources."""
    header, edits = FAULTS[name]
    out = f"{header}\n\n"
    for file, old, new in edits:
        before = (PACKAGE / file).read_text()
        if before.count(old) != 1:
            raise ValueError(f"{name}: {file} has the line of the fault {before.count(old)} times: {old!r}")
        after = before.replace(old, new)
        path = f"sglang_ddtree/{file}"
        out += "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}"))
    return out


def wanted() -> dict[Path, str]:
    """Every file that should be there, with its text."""
    out = {HERE / f"{name}.patch": patch(name) for name in FAULTS}
    for demo, name in DEMO.items():
        folder = ROOT / f"dev/demo/series-{demo}"
        for file in STANDARD.iterdir():
            out[folder / file.name] = file.read_text()
        out[folder / "series"] += f"# the fault\n9999-{name}.patch\n"
        out[folder / f"9999-{name}.patch"] = patch(name)
    return out


if __name__ == "__main__":
    for path, text in wanted().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

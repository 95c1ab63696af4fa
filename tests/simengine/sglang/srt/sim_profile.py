"""Behaviour that a patch series can change, in place of SGLang's source files.

A patch of MASK plays a fault that the self-check at start catches; one of KV_SHIFT plays a fault that slips past it
and shows in the text.
"""

# Accept length per algorithm.
ACCEPT_LENGTH = {
    "NONE": 1.0,
    "NGRAM": 1.3,
    "DFLASH": 2.11,
    "DDTREE": 2.65,
    "EAGLE3": 2.4,
}

# How the tree is masked in the verify step: "tree" or "causal".
MASK = "tree"

# Slots by which the accepted path's KV entries are moved wrongly.
KV_SHIFT = 0

"""DDTree speculative decoding for SGLang 0.5.23 (plugin of entry-point group ``sglang.srt.plugins``)."""

__version__ = "0.1.0"
SGLANG_VERSION = "0.5.23"

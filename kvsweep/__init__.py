"""kvsweep: a background scrubber for LLM prefix caches."""

__version__ = "0.1.0"

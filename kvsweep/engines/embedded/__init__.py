"""A small, real LLM engine with a paged prefix cache: what demos, tests and benchmarks run on."""

from kvsweep.engines.embedded.model import ModelConfig
from kvsweep.engines.embedded.scheduler import EmbeddedEngine, Request

__all__ = ["EmbeddedEngine", "ModelConfig", "Request"]

"""Hooks into live SGLang objects: methods wrapped on the instance, the gate around them, frees into the journal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from kvsweep.engines.sglang import SUPPORTED_VERSIONS
from kvsweep.tree import FreeJournal, Gate

logger = logging.getLogger(__name__)

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class UnsupportedSGLang(ValueError):
    """This SGLang has an object or a method kvsweep does not know; the message says what was found and expected."""


class Patches:
    """Methods wrapped on instances (never on classes: other instances in the process are left alone), and undone."""

    def __init__(self) -> None:
        self._applied: list[tuple[Any, str, Any, Any]] = []  # object, name, what the instance had itself, wrapper

    def wrap(self, target: Any, name: str, wrap: Wrap) -> None:
        """Replace `target.name` by `wrap(original bound method)`.

        Raises:
            UnsupportedSGLang: if there is no such method.
        """
        original = getattr(target, name, None)
        if not callable(original):
            supported = ", ".join(SUPPORTED_VERSIONS)
            raise UnsupportedSGLang(f"{type(target).__name__} has no method {name}() (supported: SGLang {supported})")
        own = vars(target).get(name)
        wrapper = wrap(original)
        setattr(target, name, wrapper)
        self._applied.append((target, name, own, wrapper))

    def restore(self) -> None:
        """Undo every wrap, newest first."""
        while self._applied:
            target, name, own, wrapper = self._applied.pop()
            if vars(target).get(name) is not wrapper:
                logger.warning("kvsweep: %s.%s was wrapped again by others; left as it is", type(target).__name__, name)
            elif own is None:
                delattr(target, name)
            else:
                setattr(target, name, own)


def gated(gate: Gate) -> Wrap:
    """Run the method with the gate entered, so that no snapshot sees it half done."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            with gate:
                return original(*args, **kwargs)

        return method

    return wrap


def journal_frees(patches: Patches, allocators: Iterable[tuple[str, Any]], journal: FreeJournal) -> None:
    """Note every free of these allocators (pool name, token or paged allocator) before it takes effect.

    A free inside a free group is noted when it is asked for and, for the token ids among them, once more when the
    group ends: both are before the slot can be handed out again. A free that cannot be noted (no memory for the
    copy of a view) counts as "everything was freed", which costs fingerprints and never a false alarm.
    """

    def note(pool: str, page_size: int = 1) -> Wrap:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def free(freed: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                try:
                    journal.freed(pool, freed, page_size)
                except Exception:
                    journal.lost()
                return original(freed, *args, **kwargs)

            return free

        return wrap

    def note_clear(pool: str) -> Wrap:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def clear(*args: Any, **kwargs: Any) -> Any:
                journal.cleared(pool)
                return original(*args, **kwargs)

            return clear

        return wrap

    for pool, allocator in allocators:
        patches.wrap(allocator, "free", note(pool))
        if allocator.page_size > 1:  # with pages of one slot, free_page_ids() is free()
            patches.wrap(allocator, "free_page_ids", note(pool, int(allocator.page_size)))
        patches.wrap(allocator, "clear", note_clear(pool))

"""Load for the engine: chats over shared system prompts, popular ones asked often, growing turn by turn."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvsweep.engines.embedded.scheduler import EmbeddedEngine, Request


def generate(
    engine: EmbeddedEngine, prompt: Sequence[int], max_new_tokens: int = 16, extra_key: str = "", timeout: float = 60.0
) -> list[int]:
    """The token ids that the engine answers `prompt` with; steps the engine itself if no thread is in `run`.

    Raises:
        TimeoutError: not finished by the running loop within `timeout` seconds.
        RuntimeError: the request was aborted.
    """
    request = engine.submit(prompt, max_new_tokens, extra_key)
    while not engine.looping and not request.done.is_set():
        engine.step()
    if not request.done.wait(timeout):
        raise TimeoutError(f"request {request.id} was not finished within {timeout} s")
    if request.aborted:
        raise RuntimeError(f"request {request.id} was aborted")
    return request.output


class _Client:
    """One user: asks, waits for the answer, asks on in the same chat. Its prompts depend on its random numbers only."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.request: Request | None = None
        self.chat: list[int] = []
        self.turns_left = 0
        self.extra_key = ""


class Traffic:
    """Closed-loop clients. The same arguments give every client the same prompts, whatever the engine's timing.

    A chat is a system prompt and then, a turn, a message out of a fixed set; both are chosen with probability
    proportional to 1 / rank ** skew, so that chats share prefixes and popular ones are repeated word for word.

    Args:
        engine: whom to ask.
        clients: requests outstanding at once.
        seed: of all choices.
        system_prompts: how many there are.
        system_tokens: length of each.
        messages: how many there are.
        message_tokens: shortest and longest.
        turns: most turns of a chat; a chat also ends where it would outgrow the engine.
        max_new_tokens: length of an answer.
        skew: exponent of the popularity.
        namespaces: extra_keys, one of which each chat belongs to.

    Raises:
        ValueError: if not even a first turn fits the engine.
    """

    def __init__(
        self,
        engine: EmbeddedEngine,
        *,
        clients: int = 6,
        seed: int = 0,
        system_prompts: int = 8,
        system_tokens: int = 96,
        messages: int = 64,
        message_tokens: tuple[int, int] = (8, 32),
        turns: int = 5,
        max_new_tokens: int = 16,
        skew: float = 1.1,
        namespaces: Sequence[str] = ("",),
    ) -> None:
        self._engine = engine
        self._longest = min([engine.config.max_context] + [pool.size for pool in engine.allocator.pools()])
        if system_tokens + message_tokens[1] + max_new_tokens > self._longest:
            raise ValueError(
                f"system_tokens + message_tokens + max_new_tokens must be at most {self._longest} for this engine, "
                f"got {system_tokens} + {message_tokens[1]} + {max_new_tokens}"
            )
        words = random.Random(seed)

        def text(length: int) -> list[int]:
            return [words.randrange(engine.config.vocab) for _ in range(length)]

        self._systems = [text(system_tokens) for _ in range(system_prompts)]
        self._messages = [text(words.randint(*message_tokens)) for _ in range(messages)]
        self._clients = [_Client(f"{seed}/{number}") for number in range(clients)]
        self._turns = turns
        self.max_new_tokens = max_new_tokens
        self._skew = skew
        self._namespaces = list(namespaces)
        self.submitted = 0
        self.finished = 0

    def pump(self) -> None:
        """Submit the next prompt of every client whose last one is answered; hand it to `engine.run` as before_step."""
        for client in self._clients:
            if client.request is None or client.request.done.is_set():
                client.request = self._engine.submit(self._next(client), self.max_new_tokens, client.extra_key)
                self.submitted += 1

    def _next(self, client: _Client) -> list[int]:
        if client.request is not None:
            self.finished += not client.request.aborted
            client.chat = list(client.request.tokens)
            client.turns_left = 0 if client.request.aborted else client.turns_left - 1
        message = self._pick(client, self._messages)
        if client.turns_left <= 0 or len(client.chat) + len(message) + self.max_new_tokens > self._longest:
            client.chat = self._pick(client, self._systems)
            client.extra_key = client.random.choice(self._namespaces)
            client.turns_left = client.random.randint(1, self._turns)
        return client.chat + message

    def _pick(self, client: _Client, texts: list[list[int]]) -> list[int]:
        weights = [1 / rank**self._skew for rank in range(1, len(texts) + 1)]
        return client.random.choices(texts, weights)[0]

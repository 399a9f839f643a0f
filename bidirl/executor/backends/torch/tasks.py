"""Packaged tasks: prompts as token ids and a reward; or a reward of the user's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bidirl.errors import InputError, RunFault

__all__ = ["TASKS", "Reward", "Task", "make_task", "user_reward"]

Tokens = NDArray[np.int32]
Reward = Callable[[Tokens, Tokens], float]
"""Maps (prompt tokens, response tokens) to a reward."""

CONSTANT_TOKEN = 5
"""The token that the constant task asks for; any fixed one would do."""
PLUS, EQUALS, STOP = 10, 11, 12
"""Tokens of the arithmetic task beside the digits 0 to 9."""
MAX_ADDEND = 10
"""Arithmetic adds numbers below this: one digit each."""


@dataclass(frozen=True, slots=True)
class Task:
    """Where prompts come from and what a response is worth; rewards of packaged tasks lie in [0, 1]."""

    name: str
    prompt: Callable[[np.random.Generator], Tokens]
    """Draws one prompt."""
    reward: Reward
    stop_token: int | None = None
    """Token that ends a response; None: every response is as long as it may be."""

    def prompt_of(self, seed: int, group: int) -> Tokens:
        """Return the prompt of a group; (seed, group) decide it, in any order of calls."""
        return self.prompt(np.random.default_rng(np.random.SeedSequence([seed, group])))


def _share(right: NDArray[np.bool_]) -> float:
    return float(right.mean()) if right.size else 0.0


def _constant(vocab_size: int, prompt_tokens: int) -> Task:
    def prompt(rng: np.random.Generator) -> Tokens:
        return rng.integers(vocab_size, size=prompt_tokens, dtype=np.int32)

    def reward(_: Tokens, response: Tokens) -> float:
        return _share(response == CONSTANT_TOKEN)

    return Task("constant", prompt, reward)


def _copy(vocab_size: int, prompt_tokens: int) -> Task:
    def prompt(rng: np.random.Generator) -> Tokens:
        return np.full(prompt_tokens, rng.integers(vocab_size), np.int32)

    def reward(prompt: Tokens, response: Tokens) -> float:
        return _share(response == prompt[-1])

    return Task("copy", prompt, reward)


def _digits(number: int) -> Tokens:
    return np.array([int(digit) for digit in str(number)], np.int32)


def _arithmetic(vocab_size: int, prompt_tokens: int) -> Task:
    """Ask for the digits of ``a + b =``, then STOP; longer prompts repeat the sum from the right."""
    del vocab_size

    def prompt(rng: np.random.Generator) -> Tokens:
        a, b = rng.integers(MAX_ADDEND, size=2)
        sum_ = np.array([a, PLUS, b, EQUALS], np.int32)
        return np.tile(sum_, -(-prompt_tokens // len(sum_)))[-max(prompt_tokens, len(sum_)) :]

    def reward(prompt: Tokens, response: Tokens) -> float:
        answer = np.append(_digits(int(prompt[-4]) + int(prompt[-2])), STOP)
        given = response[: len(answer)]
        return float((given == answer[: len(given)]).sum()) / len(answer)

    return Task("arithmetic", prompt, reward, STOP)


TASKS: dict[str, tuple[Callable[[int, int], Task], int]] = {
    "arithmetic": (_arithmetic, STOP + 1),
    "constant": (_constant, CONSTANT_TOKEN + 1),
    "copy": (_copy, 2),
}
"""Builder from (vocabulary, prompt tokens), and the smallest vocabulary it takes."""


def make_task(name: str, *, vocab_size: int, prompt_tokens: int, reward: str | None = None) -> Task:
    """Return a packaged task; ``reward = "module:function"`` puts the user's in place of its own.

    Raises ``InputError`` for an unknown name, too small a vocabulary, or a reward that cannot be found.
    """
    if name not in TASKS:
        raise InputError(f"task = {name!r}: no packaged task, they are {', '.join(TASKS)}; choose one")
    build, smallest = TASKS[name]
    if vocab_size < smallest:
        raise InputError(f"vocab_size = {vocab_size}: task {name!r} needs {smallest} tokens; raise it")
    if prompt_tokens < 1:
        raise InputError(f"prompt_tokens = {prompt_tokens}: a prompt has at least one token; raise it")
    task = build(vocab_size, prompt_tokens)
    if reward is None:
        return task
    return Task(task.name, task.prompt, user_reward(reward), task.stop_token)


def user_reward(path: str) -> Reward:
    """Return the reward function that ``module:function`` names, checked at every call.

    It gets the token ids of prompt and response as lists and returns a number. Raises ``InputError`` if it
    cannot be found; the returned function raises ``RunFault`` if it fails or returns no finite number.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise InputError(f"reward = {path!r}: must read module:function; correct it")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing a user's module can raise anything
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"reward = {path!r}: {module_name} cannot be imported ({type(error).__name__}: {reason}); "
            "correct it, or put its folder on PYTHONPATH"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"reward = {path!r}: {module_name} has no function {name}; correct the name")
    return _checked(path, function)


def _checked(path: str, function: Callable[[Sequence[int], Sequence[int]], Any]) -> Reward:
    def reward(prompt: Tokens, response: Tokens) -> float:
        try:
            value = float(function(prompt.tolist(), response.tolist()))
        except Exception as error:  # a user's function can raise anything
            reason = (str(error).splitlines() or [""])[0]
            raise RunFault(
                f"reward {path}: {type(error).__name__}: {reason}; correct the function"
            ) from error
        if not isfinite(value):
            raise RunFault(f"reward {path} returned {value}: must be a finite number; correct the function")
        return value

    return reward

"""Draw the groups of a job: lengths, prompts, rewards, filters and turns, block by block.

Every quantity has its own random stream for every block, keyed by name: adding a quantity changes no other,
and blocks may be drawn in any order. Lengths come from normal scores, so that two workloads that differ only
in law, cap or drift share their luck (common random numbers).
"""

from functools import lru_cache
from math import log
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from bidirl.errors import InputError
from bidirl.traces.length_fit import fit_length_law, spread_sigma
from bidirl.traces.length_sources import packaged_law, packaged_prompt, read_observed
from bidirl.traces.lengths import LengthLaw, LengthPrior
from bidirl.traces.records import GroupBlock, Turns
from bidirl.traces.workload_config import (
    DriftTo,
    LengthFile,
    LengthTable,
    Spread,
    TurnsConfig,
    WorkloadConfig,
)

__all__ = ["Workload", "WorkloadConfig"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

DEFAULT_PROMPT_TOKENS = 128
"""Text tokens of a prompt where nothing is known: the public math prompts have means of 83 to 155 tokens.
Source: verl-project/verl#316, #1208, yushengsu-thu/verl_training_log and others (docs/workloads.md)."""


class Workload:
    """The random side of a job: what group ``j`` is, whoever asks, whenever.

    `config` is what it was made from; `label`, `source`, `assumed` and `notes` say for a report where its
    lengths come from.

    Raises:
        InputError: when the file of observed lengths cannot be used, or prompts leave no room for a response.
    """

    def __init__(self, config: WorkloadConfig, base_dir: Path, entropy: int) -> None:
        """Read the length law; ``base_dir`` anchors ``lengths.file``, ``entropy`` >= 0 is the seed."""
        self.config = config
        self._entropy = entropy
        self._law = _length_law(config, base_dir)
        self._text, self._image_tokens, prompt_note, prompt_assumed = _prompt(config)
        self.label = self._law.label
        self.source = self._law.source
        self.assumed = self._law.assumed or prompt_assumed
        self.notes = (*self._law.notes, *prompt_note)
        self._max_text_tokens = self._room_for_text()
        self._turn_shares = None if config.turns is None else _turn_shares(config.turns)
        self._prior_of = lru_cache(maxsize=1024)(self._make_prior)

    def block(self, step_index: int) -> GroupBlock:
        """Draw the ``prompts_per_step`` groups nominally of step ``step_index`` >= 0.

        The index may exceed the job's last step: filtered groups are replaced by later ones.
        """
        config = self.config
        num_groups, n = config.prompts_per_step, config.samples_per_prompt
        scores = self._stream("length", step_index).standard_normal((num_groups, n))
        shared = config.group_correlation
        if shared > 0.0:
            prompt_scores = self._stream("difficulty", step_index).standard_normal((num_groups, 1))
            scores = shared**0.5 * prompt_scores + (1.0 - shared) ** 0.5 * scores
        response_tokens, truncated = self.law(step_index).sample_scores(scores)
        filtered = (
            self._stream("filter", step_index).random(num_groups) < config.filter_rate
            if config.filter_rate > 0.0
            else np.zeros(num_groups, dtype=np.bool_)
        )
        images = np.full(num_groups, self._image_tokens, dtype=np.int64)
        return GroupBlock(
            first_group=step_index * num_groups,
            prompt_tokens=self._text_tokens(step_index) + images,
            image_tokens=images,
            response_tokens=response_tokens,
            truncated=truncated,
            reward_s=self._seconds(config.reward_s, "reward", step_index, num_groups),
            filtered=filtered,
            turns=None
            if config.turns is None
            else self._turns(config.turns, step_index, response_tokens.ravel()),
        )

    def law(self, step_index: int) -> LengthLaw:
        """Return the true length law of a step, drift applied."""
        return self._law.scaled(_drift_factor(self.config, step_index))

    def prior(self, step_index: int) -> LengthPrior:
        """Return what a scheduler may know of the lengths of a step, drift applied."""
        return self._prior_of(_drift_factor(self.config, step_index))

    def _make_prior(self, factor: float) -> LengthPrior:
        text = self._text.mean if isinstance(self._text, Spread) else float(self._text)
        return self._law.scaled(factor).prior(text + self._image_tokens)

    def _stream(self, name: str, block: int) -> np.random.Generator:
        """Return the random stream of one quantity in one block; entropy, name and block decide it."""
        sequence = np.random.SeedSequence([self._entropy, crc32(name.encode()), block])
        return np.random.Generator(np.random.PCG64(sequence))

    def _room_for_text(self) -> int | None:
        config = self.config
        if config.max_seq_tokens is None:
            return None
        tools = 0 if config.turns is None else (config.turns.max - 1) * config.turns.tool_tokens
        room = config.max_seq_tokens - config.max_response_tokens - tools - self._image_tokens
        least = 1 if isinstance(self._text, Spread) else self._text
        if room < least:
            rule = f"max_seq_tokens={config.max_seq_tokens} leaves {room} tokens for a prompt of {least}"
            raise InputError(f"{rule}: raise it or lower max_response_tokens={config.max_response_tokens}")
        return room

    def _text_tokens(self, step_index: int) -> Ints:
        num_groups = self.config.prompts_per_step
        if not isinstance(self._text, Spread):
            return np.full(num_groups, self._text, dtype=np.int64)
        drawn = _log_normal(self._text, self._stream("prompt", step_index), num_groups)
        return np.rint(np.clip(drawn, 1.0, self._max_text_tokens)).astype(np.int64)

    def _seconds(self, value: float | Spread, name: str, step_index: int, size: int) -> Floats:
        if isinstance(value, Spread):
            return _log_normal(value, self._stream(name, step_index), size)
        return np.full(size, float(value))

    def _turns(self, config: TurnsConfig, step_index: int, response_tokens: Ints) -> Turns:
        """Cut each response into turns; ``response_tokens`` has one entry a sample."""
        assert self._turn_shares is not None
        uniform = self._stream("turns", step_index).random(len(response_tokens))
        counts = np.searchsorted(self._turn_shares, uniform, side="right") + 1
        counts = np.minimum(counts, response_tokens)  # a turn has at least one token
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        starts, total = offsets[:-1], int(offsets[-1])
        weights = self._stream("turn_split", step_index).standard_exponential(total)
        weights /= np.repeat(np.add.reduceat(weights, starts), counts)
        spare = response_tokens - counts
        # Shrunk by 1e-12 so that rounding never hands out more than there is; the last turn takes the rest.
        parts = 1 + np.floor(weights * np.repeat(spare, counts) * (1.0 - 1e-12)).astype(np.int64)
        last = offsets[1:] - 1
        parts[last] += response_tokens - np.add.reduceat(parts, starts)
        tool_tokens = np.full(total, config.tool_tokens, dtype=np.int64)
        tool_s = self._seconds(config.tool_s, "tool", step_index, total)
        tool_tokens[last] = 0
        tool_s[last] = 0.0
        return Turns(offsets, parts, tool_tokens, tool_s)


def _length_law(config: WorkloadConfig, base_dir: Path) -> LengthLaw:
    cap = config.max_response_tokens
    match config.lengths:
        case LengthTable() as table:
            stats = table.stats(cap)
            given = ", ".join(f"{k}={v:g}" for k, v in table.model_dump(exclude_none=True).items())
            return fit_length_law(stats, label=f"lengths {{{given}}}", source="the job's table").capped(cap)
        case LengthFile(file=file):
            return read_observed(base_dir / file, cap)
        case name:
            return packaged_law(name, cap)


def _prompt(config: WorkloadConfig) -> tuple[int | Spread, int, tuple[str, ...], bool]:
    """Return text tokens, image tokens, notes, and whether any of it is assumed."""
    packaged = packaged_prompt(config.lengths) if isinstance(config.lengths, str) else None
    images = config.image_tokens
    text = config.prompt_tokens
    notes: tuple[str, ...] = ()
    assumed = False
    if packaged is not None and (text is None or images is None):
        notes = (f"prompt: {packaged.source}",)
        assumed = packaged.assumed
        if text is None:
            p95 = packaged.p95_tokens
            mean = packaged.mean_tokens
            text = round(mean) if p95 is None else Spread(mean=mean, p95=p95)
        images = packaged.image_tokens if images is None else images
    elif text is None:
        text = DEFAULT_PROMPT_TOKENS
        notes = (f"prompt: {text} text tokens assumed: set prompt_tokens",)
        assumed = True
    return text, images or 0, notes, assumed


def _drift_factor(config: WorkloadConfig, step_index: int) -> float:
    match config.drift:
        case None:
            return 1.0
        case DriftTo(to=to, over_steps=over_steps):
            return float(to ** min(step_index / over_steps, 1.0))
        case factors:
            return factors[min(step_index, len(factors) - 1)]


def _log_normal(spread: Spread, rng: np.random.Generator, size: int) -> Floats:
    sigma = spread_sigma(spread.mean, spread.p95)
    return rng.lognormal(log(spread.mean) - 0.5 * sigma * sigma, sigma, size)


def _turn_shares(config: TurnsConfig) -> Floats:
    """Return P(turns <= k), k = 1..max, of the law ``p_k ~ r**k`` (maximum entropy) with the given mean."""
    k = np.arange(1, config.max + 1)
    if config.mean in {1.0, config.max}:
        return np.where(k >= config.mean, 1.0, 0.0)
    low, high = -50.0, 50.0  # log r
    for _ in range(80):
        middle = 0.5 * (low + high)
        weights = np.exp(middle * k - max(middle * config.max, middle))
        if float(weights @ k / weights.sum()) < config.mean:
            low = middle
        else:
            high = middle
    weights = np.exp(low * k - max(low * config.max, low))
    shares: Floats = np.cumsum(weights) / weights.sum()
    shares[-1] = 1.0
    return shares

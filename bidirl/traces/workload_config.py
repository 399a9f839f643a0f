"""The ``[workload]`` section of a job file: plain, frozen data; files are read later, by `Workload`."""

from collections.abc import Mapping
from difflib import get_close_matches
from numbers import Real
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from bidirl.errors import InputError
from bidirl.traces.length_fit import LengthStats, fit_length_law, spread_sigma
from bidirl.traces.length_sources import packaged_names

__all__ = ["DriftTo", "LengthFile", "LengthTable", "Spread", "TurnsConfig", "WorkloadConfig"]

_LAW_SUFFIXES = (".csv", ".json", ".txt")


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Spread(_Section):
    """A log-normal quantity by its mean and 95th percentile (same unit)."""

    mean: float = Field(gt=0)
    p95: float = Field(gt=0)

    @model_validator(mode="after")
    def _has_a_law(self) -> Self:
        _as_value_error(lambda: spread_sigma(self.mean, self.p95))
        return self


class LengthTable(_Section):
    """Statistics of response lengths; any that agree, at least one of ``mean``, ``p50``, ``p95``."""

    mean: float | None = Field(default=None, ge=1)
    """Mean tokens after the cut at ``max``."""
    p50: float | None = Field(default=None, ge=1)
    p95: float | None = Field(default=None, ge=1)
    max: int | None = Field(default=None, ge=1)
    """Cap under which the statistics were observed; by default the workload's ``max_response_tokens``."""
    truncated: float | None = Field(default=None, ge=0, lt=1)
    """Share of responses cut at ``max``."""
    sigma: float | None = Field(default=None, gt=0, le=4)
    """Standard deviation of log length, to go with exactly one other statistic."""

    def stats(self, max_response_tokens: int) -> LengthStats:
        """Return the statistics with the cap filled in."""
        cap = max_response_tokens if self.max is None else self.max
        return LengthStats(self.mean, self.p50, self.p95, self.truncated, self.sigma, cap)


class LengthFile(_Section):
    """A file of observed response lengths, relative to the job file."""

    file: str = Field(min_length=1)


class DriftTo(_Section):
    """Lengths multiplied by a factor that moves geometrically from 1 to ``to`` and then stays."""

    to: float = Field(gt=0, le=100)
    over_steps: int = Field(ge=1)


def _number_or_table(value: object) -> str | None:
    if isinstance(value, (Spread, Mapping)):
        return "spread"
    return "number" if isinstance(value, Real) or _is_decimal(value) else None


def _is_decimal(value: object) -> bool:
    return type(value).__name__ == "Decimal"


def _lengths_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "packaged"
    if isinstance(value, LengthFile) or (isinstance(value, Mapping) and "file" in value):
        return "file"
    return "table" if isinstance(value, (LengthTable, Mapping)) else None


def _drift_kind(value: object) -> str | None:
    if isinstance(value, (DriftTo, Mapping)):
        return "to"
    return "list" if isinstance(value, (list, tuple)) else None


def _known_law(name: str) -> str:
    if name not in packaged_names():
        near = get_close_matches(name, packaged_names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(packaged_names())
        raise ValueError(f"{name!r} is not packaged: {hint}use one of {known}, a table, or {{ file = ... }}")
    return name


def _file_from_name(value: object) -> object:
    return {"file": value} if isinstance(value, str) and value.endswith(_LAW_SUFFIXES) else value


def _tuple_from_list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _as_value_error(check: Any) -> None:
    """Run a check of the traces package so that pydantic can attach the key to its message."""
    try:
        check()
    except InputError as error:
        raise ValueError(str(error)) from None


def _choice(kinds: Any, text: str) -> Discriminator:
    return Discriminator(kinds, custom_error_type="kind", custom_error_message=text)


Seconds = Annotated[
    Annotated[Annotated[float, Field(ge=0)], Tag("number")] | Annotated[Spread, Tag("spread")],
    _choice(_number_or_table, "must be seconds or a table { mean = ..., p95 = ... }"),
]
PromptTokens = Annotated[
    Annotated[Annotated[int, Field(ge=1)], Tag("number")] | Annotated[Spread, Tag("spread")],
    _choice(_number_or_table, "must be a whole number of tokens or a table { mean = ..., p95 = ... }"),
]
Lengths = Annotated[
    Annotated[Annotated[str, AfterValidator(_known_law)], Tag("packaged")]
    | Annotated[LengthTable, Tag("table")]
    | Annotated[LengthFile, Tag("file")],
    _choice(_lengths_kind, "must be a packaged name, a table { mean = ..., p95 = ... } or { file = ... }"),
    BeforeValidator(_file_from_name),
]
Factor = Annotated[float, Field(gt=0, le=100)]
Drift = Annotated[
    Annotated[DriftTo, Tag("to")]
    | Annotated[
        Annotated[tuple[Factor, ...], Field(min_length=1), BeforeValidator(_tuple_from_list)], Tag("list")
    ],
    _choice(_drift_kind, "must be a table { to = ..., over_steps = ... } or a list of one factor a step"),
]


class TurnsConfig(_Section):
    """Several turns a sample: generate, wait for a tool, prefill its answer, generate on."""

    mean: float = Field(ge=1)
    """Mean number of turns; counts follow the maximum-entropy law on 1..``max`` with this mean."""
    max: int = Field(ge=1)
    tool_s: Seconds
    """Seconds of one tool call."""
    tool_tokens: int = Field(ge=1)
    """Tokens of one tool answer: prefilled, not trained."""

    @model_validator(mode="after")
    def _mean_within(self) -> Self:
        if self.mean > self.max:
            raise ValueError(f"mean={self.mean:g} exceeds max={self.max}: lower mean or raise max")
        return self


class WorkloadConfig(_Section):
    """What one training step consumes, and how its samples are distributed."""

    prompts_per_step: int = Field(ge=1)
    """Groups a step trains on (``B``)."""
    samples_per_prompt: int = Field(ge=1)
    """Samples a group holds (``n``)."""
    max_response_tokens: int = Field(ge=1)
    lengths: Lengths
    num_steps: int = Field(ge=1)
    prompt_tokens: PromptTokens | None = None
    """Text tokens of a prompt; left out, those of the packaged law's source, else 128 (assumed)."""
    image_tokens: int | None = Field(default=None, ge=0)
    """Image tokens of a prompt, prefilled beside its text; left out, those of the packaged law, else 0."""
    max_seq_tokens: int | None = Field(default=None, ge=2)
    """Context limit of the engine: prompt + response + tool answers must fit. No limit by default."""
    group_correlation: float = Field(default=0.0, ge=0, le=1)
    """Share of the variance of log length that the prompt explains. 0 by default: no public run prints it,
    and independent samples are the neutral choice; sweep it where a conclusion depends on whole groups."""
    drift: Drift | None = None
    """Change of length over steps, applied before the cap."""
    filter_rate: float = Field(default=0.0, ge=0, lt=1)
    """Share of groups thrown away after their reward (all rewards equal), independent of their lengths."""
    reward_s: Seconds = 0.0
    """Seconds from a group's last sample to its rewards; 0 by default: rule-based rewards are fast."""
    reward_capacity: int | None = Field(default=None, ge=1)
    """Groups rewarded at once; no limit by default."""
    turns: TurnsConfig | None = None
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer updates a step (``M``); 1 is the paper's default (design.md section 2)."""
    old_logprob: Literal["on", "off"] = "on"
    """Recompute log-probabilities before the update; on, as asynchronous runs need them at the consuming
    version."""
    reference: Literal["on", "off"] = "on"
    """Forward pass of a reference model. On, since GRPO as the paper's base runs it has a KL loss: the public
    Geo3K timing of that framework spends 82 of 290 s in it. Source: verl-project/verl#7203."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.prompts_per_step % self.mini_batches:
            rule = (
                f"mini_batches={self.mini_batches} does not divide prompts_per_step={self.prompts_per_step}"
            )
            raise ValueError(f"{rule}: choose a divisor")
        lengths = self.lengths
        if isinstance(lengths, LengthTable):
            stats = lengths.stats(self.max_response_tokens)
            _as_value_error(lambda: fit_length_law(stats, label="lengths", source="table"))
        if isinstance(self.drift, tuple) and len(self.drift) > self.num_steps:
            raise ValueError(
                f"drift lists {len(self.drift)} factors for num_steps={self.num_steps}: drop the rest"
            )
        if self.max_seq_tokens is not None:
            self._fits(self.max_seq_tokens)
        return self

    def _fits(self, max_seq_tokens: int) -> None:
        prompt = (
            self.prompt_tokens.mean if isinstance(self.prompt_tokens, Spread) else self.prompt_tokens or 1
        )
        tools = 0 if self.turns is None else (self.turns.max - 1) * self.turns.tool_tokens
        needed = round(prompt) + (self.image_tokens or 0) + self.max_response_tokens + tools
        if needed > max_seq_tokens:
            rule = f"max_seq_tokens={max_seq_tokens} is below prompt + response + tool tokens = {needed}"
            raise ValueError(f"{rule}: raise it or lower max_response_tokens")

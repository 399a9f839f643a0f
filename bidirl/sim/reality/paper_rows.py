"""Which simulations answer which printed number of the paper; nothing here is fitted.

A speed-up is BiDiRL on the partition of Algorithm 1 over the strongest asynchronous baseline on the equal
split, the way the paper uses the two. Beside it: both on the equal split (borrowing alone), and over the
baseline on the better of the two splits (borrowing alone, no help from a badly chosen split).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from bidirl.sim.reality.paper_cells import ASYNC_BASELINES, Setting, planned_split, rates, splits

__all__ = [
    "ANSWERS",
    "COLOCATED",
    "FIT_KEY",
    "Answer",
    "Effort",
    "Key",
    "Points",
    "Readings",
    "Span",
    "speed_up",
]

Key = tuple[str, str]
"""(quantity, setting) of a row of bidirl_paper_numbers.csv."""

ABLATED = ("no_borrow", "opportunistic", "rollout_on_train", "train_on_rollout", "bidirl")
FIT_KEY: Key = ("speedup", "A6000 max response 2K")
"""The one row that the trainer's scale is fitted on: the paper's default setting."""
COLOCATED: Key = ("speedup at s = 0 vs veRL colocated", "A6000 default")
"""Printed as "about equal", so it is not in the table of numbers. Source: paper.md."""


class Points(StrEnum):
    """Which points of a sweep are run."""

    ALL = "all"
    ENDS = "ends"


class Readings(StrEnum):
    """Which readings of a speed-up are computed."""

    ALL = "all"
    MAIN = "main"
    """Only the one that is held against the paper."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to simulate."""

    measured_steps: int
    points: Points = Points.ALL
    readings: Readings = Readings.ALL

    def cut(self, points: Sequence[Setting]) -> Sequence[Setting]:
        """Return the points of a sweep that are run."""
        return points if self.points is Points.ALL or len(points) <= 2 else (points[0], points[-1])


@dataclass(frozen=True, slots=True)
class Span:
    """Lowest and highest ratio over the cells of a row."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Span":
        """Return the span of some ratios; one at least."""
        found = list(values)
        return cls(min(found), max(found))

    @property
    def text(self) -> str:
        """Return it with two decimals; one number where both ends print the same."""
        low, high = f"{self.low:.2f}", f"{self.high:.2f}"
        return low if low == high else f"{low}-{high}"


@dataclass(frozen=True, slots=True)
class Answer:
    """Ours for one row: the span that is held against the paper's, and two other readings of it."""

    main: Span
    num_settings: int
    same_split: Span | None = None
    over_best: Span | None = None


def speed_up(setting: Setting, scale: float, effort: Effort) -> tuple[float, ...]:
    """Return BiDiRL over the strongest asynchronous baseline: ``(main[, same split, over best])``."""
    steps = effort.measured_steps
    equal, planned = setting.default_split, planned_split(setting, scale)

    def ours(split: int) -> float:
        return rates(setting, ("bidirl",), split, scale, steps)["bidirl"]

    def strongest(split: int) -> float:
        return max(rates(setting, ASYNC_BASELINES, split, scale, steps).values())

    main = ours(planned) / strongest(equal)
    if effort.readings is Readings.MAIN:
        return (main,)
    best = max(strongest(equal), strongest(planned))
    return main, ours(equal) / strongest(equal), ours(planned) / best


def _sweep(*points: Setting) -> Callable[[float, Effort], Answer]:
    def answer(scale: float, effort: Effort) -> Answer:
        chosen = effort.cut(points)
        spans = [Span.of(one) for one in zip(*(speed_up(p, scale, effort) for p in chosen), strict=True)]
        return Answer(spans[0], len(chosen), *spans[1:])

    return answer


def _partitions(setting: Setting) -> Callable[[float, Effort], Answer]:
    """Compare on every split, both sides on the same one."""

    def answer(scale: float, effort: Effort) -> Answer:
        found = []
        for split in splits(setting):
            ours = rates(setting, ("bidirl",), split, scale, effort.measured_steps)
            theirs = rates(setting, ASYNC_BASELINES, split, scale, effort.measured_steps)
            found.append(ours["bidirl"] / max(theirs.values()))
        return Answer(Span.of(found), len(found))

    return answer


def _spread(setting: Setting) -> Callable[[float, Effort], Answer]:
    """Best over worst split without borrowing, as Algorithm 1 predicts; with it in ``same_split``."""

    def answer(scale: float, effort: Effort) -> Answer:
        ratios = []
        for policy in ("no_borrow", "bidirl"):
            found = [
                rates(setting, (policy,), split, scale, effort.measured_steps)[policy]
                for split in splits(setting)
            ]
            ratios.append(max(found) / min(found))
        return Answer(Span(ratios[0], ratios[0]), len(splits(setting)), Span(ratios[1], ratios[1]))

    return answer


def _ablation(*arms: str) -> Callable[[float, Effort], Answer]:
    """Compare full borrowing with the strongest of some ablated arms, on the paper's own splits."""

    def answer(scale: float, effort: Effort) -> Answer:
        found = []
        for points, split in ((ABLATION_4B, 4), (ABLATION_8B, 8)):
            for point in effort.cut(points):
                rate = rates(point, ABLATED, split, scale, effort.measured_steps)
                found.append(rate["bidirl"] / max(rate[arm] for arm in arms))
        return Answer(Span.of(found), len(found))

    return answer


def _over_colocated(scale: float, effort: Effort) -> Answer:
    setting = Setting(staleness="0")
    spans = []
    for split in (planned_split(setting, scale), setting.default_split):
        rate = rates(setting, ("bidirl", "colocated_sync"), split, scale, effort.measured_steps)
        spans.append(Span.of([rate["bidirl"] / rate["colocated_sync"]]))
    return Answer(spans[0], 1, spans[1])


A6000 = Setting()
H100 = Setting(gpu="H100", prompts=128)
STALENESS = ("0", "0.5", "1", "2", "4")


def _lengths(base: Setting) -> tuple[Setting, ...]:
    return tuple(replace(base, max_response_tokens=1024 * kilo) for kilo in (1, 2, 4))


def _staleness(base: Setting) -> tuple[Setting, ...]:
    return tuple(replace(base, staleness=s) for s in STALENESS)


def _scale_up(base: Setting) -> tuple[Setting, ...]:
    """Twice the nodes with the same batch and with twice the batch; the paper's choice is not known to us."""
    return (replace(base, num_gpus=32), replace(base, num_gpus=32, prompts=2 * base.prompts))


BATCH_RESOURCE = (replace(A6000, prompts=32), replace(A6000, prompts=128), replace(A6000, num_gpus=8))
MODEL_DATA = (replace(A6000, model="Qwen3-VL-2B"), replace(A6000, model="Qwen3-8B"))
ABLATION_4B = tuple(replace(A6000, prompts=60, staleness=s) for s in ("0", "1", "4"))
"""Source: paper.md, ablation: 4R:12T of 16 GPUs, 60 prompts; staleness bounds of the public RFC."""
ABLATION_8B = tuple(replace(A6000, model="Qwen3-8B", prompts=256, staleness=s) for s in ("0", "1"))
"""Source: paper.md, ablation, 8B text: 8R:8T, 256 prompts; its staleness is not stated, 1 is the default."""
A6000_SWEEPS = (*_lengths(A6000), *_staleness(A6000), *BATCH_RESOURCE, *MODEL_DATA)
H100_SWEEPS = (*_lengths(H100), *_staleness(H100))

ANSWERS: Mapping[Key, Callable[[float, Effort], Answer]] = {
    ("speedup vs veRL/AReaL/ROLL", "all end-to-end settings"): _sweep(
        *dict.fromkeys((*A6000_SWEEPS, *H100_SWEEPS, *_scale_up(A6000), *_scale_up(H100)))
    ),
    ("speedup", "A6000 default/staleness/batch-resource/model-dataset sweeps"): _sweep(
        *dict.fromkeys(A6000_SWEEPS)
    ),
    ("speedup", "A6000 32 GPU scale-up"): _sweep(*_scale_up(A6000)),
    ("speedup", "H100 default"): _sweep(*_lengths(H100)),
    ("speedup", "H100 scale-up"): _sweep(*_scale_up(H100)),
    ("speedup", "H100 partition sweep Qwen3VL-4B"): _partitions(H100),
    ("speedup", "H100 partition sweep Qwen3VL-2B"): _partitions(replace(H100, model="Qwen3-VL-2B")),
    **{
        ("speedup", f"A6000 max response {point.max_response_tokens // 1024}K"): _sweep(point)
        for point in _lengths(A6000)
    },
    ("speedup", "A6000 staleness sweep"): _sweep(*_staleness(A6000)),
    ("speedup", "H100 staleness sweep"): _sweep(*_staleness(H100)),
    ("ablation: vs strongest valid ablated variant", "A6000"): _ablation(*ABLATED[:-1]),
    ("ablation: vs no borrow", "A6000"): _ablation("no_borrow"),
    ("ablation: vs opportunistic", "A6000"): _ablation("opportunistic"),
    ("ablation: vs w/o T-on-R", "A6000"): _ablation("rollout_on_train"),
    ("ablation: vs w/o R-on-T", "A6000"): _ablation("train_on_rollout"),
    ("ablation: vs stronger one-direction", "A6000"): _ablation("rollout_on_train", "train_on_rollout"),
    ("planner partition sweep spread (max/min throughput)", "Qwen3VL-2B"): _spread(
        replace(H100, model="Qwen3-VL-2B")
    ),
    ("planner partition sweep spread (max/min throughput)", "Qwen3VL-4B"): _spread(H100),
    COLOCATED: _over_colocated,
}
"""Row of the paper -> how a simulation answers it, from (trainer scale, effort)."""

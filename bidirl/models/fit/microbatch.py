"""Seconds of a trainer's micro-batch (forward, backward, update), fitted over boards and models.

One sequence of ``L`` tokens per GPU takes (form ours)

``(4 * flop_per_token * L / (rate * e_lin) + 4 * flop_per_pair * L**2 / 2 / (rate * e_pair)) * offload
+ fixed + host * params * (d - 1) / d``

with ``rate`` the board's BF16 peak, 4 forward passes of work (``roofline.UPDATE_FORWARDS``), two utilisations
``e_lin``, ``e_pair`` for each (board, model), and the last term only where all weights train with optimizer
states on the host. Utilisations of groups scatter around the means of their class (dense, experts) and of
their board, so that a group with one row, or none, still gets a number. MAP in logarithms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import exp, log, sqrt
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bidirl.errors import InputError
from bidirl.models.architecture import Architecture
from bidirl.models.catalogue import Gpu
from bidirl.models.estimate import Estimate, Source
from bidirl.models.fit.regression import t_quantile
from bidirl.models.roofline import EXPERT_TRAIN_EFFICIENCY, TRAIN_EFFICIENCY, UPDATE_FORWARDS
from bidirl.models.trainer import SegmentCost

__all__ = [
    "FittedMicrobatch",
    "MicroBatch",
    "MicroBatchRow",
    "Weights",
    "fit_microbatch",
    "fitted_from_mapping",
    "leave_out",
]

Array = npt.NDArray[np.float64]
Weights = Literal["all_host_optimizer", "all", "adapter"]
"""What trains: all weights with the optimizer's states on the host, all weights, or an adapter."""

NOISE = 0.08
"""Scatter of log time that the form leaves. Of 0.04, 0.08, 0.10 the best by leave-one-out."""
GROUP_SPREAD = 0.5
"""Prior scatter of a group's linear utilisation (log) around its class."""
PAIR_SPREAD = 0.4
"""Prior scatter of a group's attention utilisation (log) around its board. Results change little for half or
twice of both (docs/fit_points.md)."""
CLASS_SPREAD = 0.7
PAIR_EFFICIENCY = 0.4
"""Prior share of the peak that attention reaches; with ``CLASS_SPREAD`` it only starts the board's mean."""
HOST_S_PER_PARAM = 0.6e-9
OFFLOAD_FACTOR = 1.02
FIXED_S = 0.05
"""Priors of the shared terms, known to a factor of e (offload: 3 %).
Source: docs/models.md, prime-rl rows."""
SHARED = ("host_s_per_param", "offload_factor", "fixed_s")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What was run: one sequence per GPU."""

    device: Gpu
    model: Architecture
    num_gpus: int
    seq_tokens: int
    weights: Weights
    activations: Literal["recompute", "offload"] = "recompute"

    @property
    def group(self) -> tuple[str, str]:
        """Return the (board, model) whose utilisations count."""
        return self.device.name, self.model.name

    @property
    def linear_s(self) -> float:
        """Return the seconds of the linear layers at the board's peak."""
        rate = self.device.need("bf16_flop_per_s")
        return UPDATE_FORWARDS * self.model.flop_per_token * self.seq_tokens / rate

    @property
    def pair_s(self) -> float:
        """Return the seconds of causal attention at the board's peak."""
        rate = self.device.need("bf16_flop_per_s")
        return UPDATE_FORWARDS * self.model.flop_per_pair * self.seq_tokens**2 / 2.0 / rate

    @property
    def host_params(self) -> float:
        """Return the parameters whose optimizer step crosses to the host: none on a single GPU."""
        sharded = (self.num_gpus - 1) / self.num_gpus
        return self.model.num_params * sharded if self.weights == "all_host_optimizer" else 0.0


@dataclass(frozen=True, slots=True)
class MicroBatchRow:
    """A micro-batch and its measured seconds."""

    run: MicroBatch
    seconds: float

    def __post_init__(self) -> None:
        """Refuse a time that beats the board's peak: its timer missed the work."""
        floor = 0.75 * (self.run.linear_s + self.run.pair_s)
        if not floor <= self.seconds < float("inf"):
            raise InputError(
                f"micro-batch of {self.run.model.name}, {self.run.seq_tokens} tokens in {self.seconds} s on "
                f"{self.run.device.name}: the peak allows {floor:.3g} s; the timer missed work, "
                "leave the row out"
            )


@dataclass(frozen=True, slots=True)
class FittedMicrobatch:
    """Fitted utilisations; only this predicts."""

    groups: tuple[tuple[str, str], ...]
    boards: tuple[str, ...]
    theta: tuple[float, ...]
    """Logarithms: 1 / e_lin per group, 1 / e_pair per group, class means (dense, experts), board means,
    host s per 1e9 params, offload factor, fixed seconds."""
    covariance: tuple[tuple[float, ...], ...]
    noise: float
    """Standard deviation of log time around the fit."""
    num_rows: int
    seq_range: tuple[int, int]
    data_hash: str

    def seconds(self, run: MicroBatch) -> Estimate:
        """Return the seconds of ``run`` with a 90 % interval.

        A (board, model) without rows takes the means of its class and board: ``transferred``. Outside twice
        the fitted sequence lengths the estimate is flagged as extrapolated.
        """
        theta = np.array(self.theta)
        value = _seconds(theta, _lay(self.groups, self.boards), run)
        gradient = self._gradient(run, theta)
        known = run.group in self.groups
        variance = float(gradient @ np.array(self.covariance) @ gradient) + self.noise**2
        if not known:
            variance += GROUP_SPREAD**2 + PAIR_SPREAD**2
        dof = max(self.num_rows - 2 * len(self.groups) - len(SHARED), 2)
        factor = exp(t_quantile(0.95, dof) * sqrt(variance))
        source = Source.FITTED if known else Source.TRANSFERRED
        estimate = Estimate.within(value, factor, source, f"{run.device.name}, {run.model.name}")
        low, high = self.seq_range
        if not low / 2 <= run.seq_tokens <= 2 * high:
            estimate = estimate.flagged(f"{run.seq_tokens} tokens, measured {low} to {high}")
        return estimate

    def _gradient(self, run: MicroBatch, theta: Array) -> Array:
        layout, step = _lay(self.groups, self.boards), 1e-5
        gradient = np.zeros(len(theta))
        for index in range(len(theta)):
            moved = [theta.copy(), theta.copy()]
            moved[0][index] += step
            moved[1][index] -= step
            high, low = (log(_seconds(t, layout, run)) for t in moved)
            gradient[index] = (high - low) / (2.0 * step)
        return gradient

    def update_segment(self, device: Gpu, model: Architecture) -> tuple[SegmentCost, float]:
        """Return the update's cost per effective token and its ``pair_tokens``, for ``TrainerModel``.

        The effective token of the trainer is one token's linear work; ``pair_tokens`` follows from both
        utilisations.
        """
        one = MicroBatch(device, model, 1, 1, "all")
        linear, pair = _logs(np.array(self.theta), _lay(self.groups, self.boards), one)
        alpha_s = one.linear_s * exp(linear)
        pair_tokens = model.pair_tokens * exp(pair - linear)
        return SegmentCost(self.shared["fixed_s"], alpha_s), pair_tokens

    @property
    def shared(self) -> dict[str, float]:
        """Return the terms that all groups share."""
        host, offload, fixed = (exp(number) for number in self.theta[-3:])
        return {"host_s_per_param": host * 1e-9, "offload_factor": offload, "fixed_s": fixed}

    def utilisation(self, group: tuple[str, str]) -> tuple[float, float]:
        """Return ``(e_lin, e_pair)`` of a fitted group; raise ``InputError`` for another."""
        if group not in self.groups:
            raise InputError(f"{group[1]} on {group[0]} was not fitted: give rows of it, or use seconds()")
        index = self.groups.index(group)
        return exp(-self.theta[index]), exp(-self.theta[len(self.groups) + index])

    def to_mapping(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {"kind": "fitted-microbatch", **asdict(self)}


def fitted_from_mapping(data: Mapping[str, Any]) -> FittedMicrobatch:
    """Read what ``FittedMicrobatch.to_mapping`` wrote; raise ``InputError`` for anything else."""
    try:
        named = {key: value for key, value in data.items() if key != "kind"}
        if data["kind"] != "fitted-microbatch":
            raise ValueError(data["kind"])
        named["groups"] = tuple((str(board), str(model)) for board, model in named["groups"])
        named["covariance"] = tuple(tuple(line) for line in named["covariance"])
        for key in ("boards", "theta", "seq_range"):
            named[key] = tuple(named[key])
        return FittedMicrobatch(**named)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"fitted micro-batch data: {error}: give what to_mapping wrote") from None


_Layout = tuple[dict[tuple[str, str], int], dict[str, int]]


def _lay(groups: Sequence[tuple[str, str]], boards: Sequence[str]) -> _Layout:
    return {group: i for i, group in enumerate(groups)}, {board: i for i, board in enumerate(boards)}


def _logs(theta: Array, layout: _Layout, run: MicroBatch) -> tuple[float, float]:
    """Return log(1 / e_lin) and log(1 / e_pair) of a run: its group's, or the means."""
    groups, boards = layout
    num = len(groups)
    if run.group in groups:
        index = groups[run.group]
        return float(theta[index]), float(theta[num + index])
    means = theta[2 * num : 2 * num + 2]
    pairs = theta[2 * num + 2 : 2 * num + 2 + len(boards)]
    board = boards.get(run.device.name)
    pair = float(pairs[board]) if board is not None else float(pairs.mean())
    return float(means[int(run.model.num_experts > 0)]), pair


def _seconds(theta: Array, layout: _Layout, run: MicroBatch) -> float:
    host, offload, fixed = theta[-3:]
    linear, pair = _logs(theta, layout, run)
    work = run.linear_s * exp(linear) + run.pair_s * exp(pair)
    work *= exp(offload) if run.activations == "offload" else 1.0
    return work + exp(fixed) + exp(host) * 1e-9 * run.host_params


def fit_microbatch(rows: Sequence[MicroBatchRow]) -> FittedMicrobatch:
    """Fit all rows together; raise ``InputError`` without rows.

    Parameters: two per (board, model), one per class and board, three shared; each has a prior.
    """
    from scipy.optimize import least_squares

    if not rows:
        raise InputError("micro-batch fit of 0 rows: needs one or more; predict from the roofline instead")
    groups = tuple(sorted({row.run.group for row in rows}))
    boards = tuple(sorted({board for board, _ in groups}))
    expert = {row.run.group: int(row.run.model.num_experts > 0) for row in rows}
    kinds = np.array([expert[group] for group in groups])
    board_of = np.array([boards.index(board) for board, _ in groups])
    num = len(groups)
    measured = np.array([row.seconds for row in rows])
    class_prior = np.log([1.0 / TRAIN_EFFICIENCY, 1.0 / EXPERT_TRAIN_EFFICIENCY])
    shared_prior = np.array([log(HOST_S_PER_PARAM * 1e9), log(OFFLOAD_FACTOR), log(FIXED_S)])
    shared_spread = np.array([1.0, 0.03, 1.0])
    runs = [row.run for row in rows]
    own = np.array([groups.index(run.group) for run in runs])
    linear_s, pair_s = np.array([run.linear_s for run in runs]), np.array([run.pair_s for run in runs])
    host_params = np.array([run.host_params for run in runs])
    offload = np.array([float(run.activations == "offload") for run in runs])

    def seconds(theta: Array) -> Array:
        work = linear_s * np.exp(theta[own]) + pair_s * np.exp(theta[num + own])
        host_s = np.exp(theta[-3]) * 1e-9 * host_params
        return np.asarray(work * np.exp(theta[-2] * offload) + np.exp(theta[-1]) + host_s)

    def residuals(theta: Array) -> Array:
        classes, pairs = theta[2 * num : 2 * num + 2], theta[2 * num + 2 : -3]
        return np.concatenate(
            [
                np.log(seconds(theta) / measured) / NOISE,
                (theta[:num] - classes[kinds]) / GROUP_SPREAD,
                (theta[num : 2 * num] - pairs[board_of]) / PAIR_SPREAD,
                (classes - class_prior) / CLASS_SPREAD,
                (pairs + log(PAIR_EFFICIENCY)) / CLASS_SPREAD,
                (theta[-3:] - shared_prior) / shared_spread,
            ]
        )

    start = np.concatenate(
        [class_prior[kinds], np.full(num, -log(PAIR_EFFICIENCY)), class_prior,
         np.full(len(boards), -log(PAIR_EFFICIENCY)), shared_prior]
    )  # fmt: skip
    solution = least_squares(residuals, start)
    jacobian = np.asarray(solution.jac, dtype=float)
    covariance = np.linalg.inv(jacobian.T @ jacobian)
    errors = solution.fun[: len(rows)] * NOISE
    spent = min(2 * num + len(SHARED), len(rows) - 1)
    noise = max(sqrt(float((errors**2).sum()) / max(len(rows) - spent, 1)), NOISE)
    text = repr([(r.run.group, r.run.num_gpus, r.run.seq_tokens, r.run.weights, r.run.activations, r.seconds)
                 for r in rows])  # fmt: skip
    lengths = [run.seq_tokens for run in runs]
    return FittedMicrobatch(
        groups=groups,
        boards=boards,
        theta=tuple(solution.x.tolist()),
        covariance=tuple(tuple(line) for line in covariance.tolist()),
        noise=noise,
        num_rows=len(rows),
        seq_range=(min(lengths), max(lengths)),
        data_hash=sha256(text.encode()).hexdigest()[:16],
    )


def leave_out(
    rows: Sequence[MicroBatchRow], unit: Callable[[MicroBatchRow], object]
) -> list[tuple[MicroBatchRow, Estimate]]:
    """Predict each row from a fit without any row of the same ``unit`` (the row itself, its group, ...)."""
    predicted = []
    for key in dict.fromkeys(unit(row) for row in rows):
        fitted = fit_microbatch([row for row in rows if unit(row) != key])
        predicted += [(row, fitted.seconds(row.run)) for row in rows if unit(row) == key]
    return predicted

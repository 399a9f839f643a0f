"""The staleness bound of a plan in the convention of each framework.

Ours is ``A(v) = floor((v + 1 + s) * B)``: before version ``v + 1`` is there, at most so many groups have been
started (design.md section 5). A bound is never made looser. What a framework cannot hold exactly is rounded
down with a note; where rounding down would switch asynchrony off, or the framework cannot go so low, it is
refused. Source of the conventions: needs.md, "Staleness conventions side by side"; frameworks.md sections
2 to 12; the files named in ``options.py``.
"""

from dataclasses import dataclass
from decimal import Decimal
from math import ceil, floor

from bidirl.errors import InputError

__all__ = [
    "WholeSteps",
    "age_threshold",
    "roll_ratio",
    "verl_budget",
    "verl_float_note",
    "whole_steps",
]


@dataclass(frozen=True, slots=True)
class WholeSteps:
    """A bound in whole steps, and the note that tells what rounding did."""

    steps: int
    notes: tuple[str, ...] = ()


def whole_steps(
    bound: Decimal, framework: str, option: str, *, least: int = 0, most: int | None = None
) -> WholeSteps:
    """Return the bound for an option that takes whole steps from ``least`` to ``most``.

    Raises:
        InputError: ``0 < s < 1``, or ``s`` below what the framework can hold.
    """
    if bound < least:
        raise InputError(
            f"staleness = {bound}: {framework} always runs {least} step ahead ({option} from {least}); "
            f"plan with staleness {least} or export to another framework"
        )
    if 0 < bound < 1:
        raise InputError(
            f"staleness = {bound}: {framework} takes whole steps only ({option}), and 0 would switch "
            "asynchrony off; plan with staleness 0 or 1, or export to verl, which takes fractions"
        )
    steps = floor(bound)
    notes = []
    if steps != bound:
        notes.append(
            f"Rounded: staleness {bound} became {option} {steps}, as it takes whole steps; never looser "
            "than asked."
        )
    if most is not None and steps > most:
        notes.append(
            f"Rounded: staleness {bound} became {most}, since {framework} never runs further ahead "
            f"({option})."
        )
        steps = most
    return WholeSteps(steps, tuple(notes))


def age_threshold(bound: Decimal) -> int:
    """Return verl V1's ``max_off_policy_threshold`` that lets a lag of ``ceil(s)`` versions pass.

    It counts the versions a group spans, ``consumed - issued + 1``, and drops above the threshold.
    Source: verl 0.9.1 ``trainer/ppo/v1/replay_buffer.py``, ``_stale_terminal_keys``.
    """
    return ceil(bound) + 1


def verl_budget(required_groups: int, bound: Decimal, sync_steps: int) -> int:
    """Return the groups that verl's fully asynchronous rollouter may start between two syncs.

    Source: verl 0.9.1 ``fully_async_rollouter.py``, ``set_max_required_samples``: a product of floats, cut
    to an integer.
    """
    return int(required_groups * (float(bound) + 1) * sync_steps)


def verl_float_note(required_groups: int, bound: Decimal, sync_steps: int) -> tuple[str, ...]:
    """Return a note where verl's floats lose a group against ``floor((1 + s) * B)``, else nothing."""
    exact = floor((1 + bound) * required_groups * sync_steps)
    found = verl_budget(required_groups, bound, sync_steps)
    if found == exact:
        return ()
    return (
        f"Rounded: verl multiplies in floats and starts up to {found} groups a sync, exact would be {exact}.",
    )


def roll_ratio(bound: Decimal, prompts_per_step: int) -> tuple[Decimal, tuple[str, ...]]:
    """Return ROLL's ``async_generation_ratio`` and its notes: 0, or any number from 1.

    Its quota is ``ceil(B * ratio) + B``, then ``B`` a step, so a fraction of a group is rounded up there;
    here the ratio is lowered to whole groups before. Source: frameworks.md section 5; ROLL
    ``rlvr_config.py``: ``async_generation_ratio >= 1.0``.

    Raises:
        InputError: ``0 < s < 1``.
    """
    if 0 < bound < 1:
        raise InputError(
            f"staleness = {bound}: ROLL takes async_generation_ratio 0 or from 1; plan with staleness 0 or "
            "1, or export to verl, which takes fractions"
        )
    if bound * prompts_per_step == floor(bound * prompts_per_step):
        return bound, ()
    steps = Decimal(floor(bound))
    note = (
        f"Rounded: {bound} x {prompts_per_step} prompts is no whole number of groups, which ROLL rounds "
        f"up: async_generation_ratio is {steps}, never looser than asked."
    )
    return steps, (note,)

"""What each framework does of its own accord, so that an export can say where a plan asks for more.

Source: frameworks.md, section 15 and the section of each system.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from bidirl.planner.export.plan_file import ExportPlan
from bidirl.planner.policy import (
    BatchOrder,
    Expiry,
    Gate,
    Granularity,
    InFlight,
    Lending,
    VersionMode,
)

__all__ = ["Behaviour", "differences"]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The choices of a policy that a framework has; a plan with another one gets a note."""

    in_flight: tuple[InFlight, ...]
    batch_order: tuple[BatchOrder, ...]
    expiry: tuple[Expiry, ...] = (Expiry.NEVER,)
    granularity: tuple[Granularity, ...] = (Granularity.FULL,)
    lends_to_rollout: bool = False
    """Whether idle trainer GPUs can generate for a while."""


def differences(plan: ExportPlan, framework: str, has: Behaviour) -> tuple[str, ...]:
    """Return one sentence for each choice of the plan that the framework cannot carry out."""
    return tuple(_differences(plan, framework, has))


def _differences(plan: ExportPlan, framework: str, has: Behaviour) -> Iterator[str]:
    policy = plan.policy
    if policy.version_mode is VersionMode.PINNED:
        yield (
            f"Not expressed: version_mode = pinned. {framework} generates with the newest weights, so "
            "samples depend on timing and the neutrality proof does not hold there."
        )
    yield from _lending(plan, framework, has)
    if plan.colocated:
        return
    choices: list[tuple[str, StrEnum, tuple[StrEnum, ...]]] = [
        ("batch_order", policy.batch_order, has.batch_order),
        ("expiry", policy.expiry, has.expiry),
    ]
    if plan.mini_batches > 1:
        choices.append(("granularity", policy.granularity, has.granularity))
    if plan.staleness > 0:
        choices.append(("in_flight", policy.in_flight, has.in_flight))
    for name, wanted, available in choices:
        if wanted not in available:
            yield f"Differs: the plan has {name} = {wanted}, {framework} does {' or '.join(available)}."


def _lending(plan: ExportPlan, framework: str, has: Behaviour) -> Iterator[str]:
    lending = plan.policy.lending
    if lending in (Lending.TRAIN_ON_ROLLOUT, Lending.BOTH):
        yield (
            f"Not expressed: lending train_on_rollout. In {framework} idle rollout GPUs cannot train, so "
            "expect the plan's throughput without it."
        )
    if lending in (Lending.ROLLOUT_ON_TRAIN, Lending.BOTH):
        if not has.lends_to_rollout:
            yield (
                f"Not expressed: lending rollout_on_train. In {framework} idle training GPUs cannot "
                "generate, so expect the plan's throughput without it."
            )
        elif plan.policy.gate is not Gate.AVERAGES:
            yield (
                f"Differs: the plan's gate is {plan.policy.gate}; {framework} lends when averages of the "
                "last three switches promise a gain."
            )

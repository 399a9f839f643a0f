"""A plan as JSON data and back, to the same bits: what a journal and a plan file carry."""

import json
from dataclasses import asdict, fields
from typing import Any, get_args, get_type_hints

from pydantic import ValidationError

from bidirl.errors import InputError
from bidirl.models.stages import StageModels
from bidirl.planner.plan import Plan
from bidirl.planner.policy import PolicyConfig
from bidirl.traces.lengths import LengthPrior

__all__ = ["plan_from_json", "plan_to_json"]

_NESTED = frozenset({"policy", "models", "priors", "notes"})


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain JSON data; decimals are strings, floats keep every digit."""
    data: dict[str, Any] = {
        spec.name: getattr(plan, spec.name) for spec in fields(plan) if spec.name not in _NESTED
    }
    return data | {
        "policy": plan.policy.model_dump(mode="json"),
        "models": plan.models.to_json(),
        "priors": [asdict(prior) | {"quantiles": list(prior.quantiles)} for prior in plan.priors],
        "notes": list(plan.notes),
    }


def plan_from_json(data: object) -> Plan:
    """Read what ``plan_to_json`` wrote.

    Raises:
        InputError: a key is missing, unknown, or holds a value of another type; one line names it.
    """
    if not isinstance(data, dict):
        raise InputError(f"plan is {type(data).__name__}: must be a table; give one that a run wrote")
    hints = get_type_hints(Plan)
    names = {spec.name: spec for spec in fields(Plan)}
    for wrong in (*(set(data) - set(names)), *(name for name in names if name not in data)):
        rule = "is missing" if wrong in names else "is unknown"
        raise InputError(f"plan.{wrong} {rule}: the keys are {', '.join(names)}; give a plan of this release")
    values: dict[str, Any] = {
        name: _plain(name, data[name], hints[name]) for name in names if name not in _NESTED
    }
    return Plan(
        **values,
        policy=_policy(data["policy"]),
        models=StageModels.from_json(data["models"]),
        priors=tuple(_prior(item) for item in _rows("priors", data["priors"])),
        notes=tuple(str(item) for item in _rows("notes", data["notes"])),
    )


def _plain(name: str, value: object, hint: Any) -> object:
    """Check an integer, a bool, or an optional one; bool is no integer here."""
    kinds = get_args(hint) or (hint,)
    if type(value) not in kinds:
        expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise InputError(f"plan.{name} = {value!r}: must be {expected}; give one that a run wrote")
    return value


def _rows(name: str, value: object) -> list[Any]:
    if not isinstance(value, list) or (name == "priors" and not value):
        raise InputError(f"plan.{name} is {type(value).__name__}: must be a list; give one that a run wrote")
    return value


def _policy(data: object) -> PolicyConfig:
    try:
        return PolicyConfig.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(("plan.policy", *map(str, first["loc"])))
        message = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
        raise InputError(f"{place}: {message}; give one that a run wrote") from None


def _prior(data: object) -> LengthPrior:
    match data:
        case {
            "quantiles": [*quantiles],
            "mean_tokens": float() | int() as mean,
            "max_tokens": int() as longest,
            "prompt_mean_tokens": float() | int() as prompt,
        } if quantiles and all(isinstance(item, float | int) for item in quantiles):
            return LengthPrior(tuple(map(float, quantiles)), float(mean), longest, float(prompt))
    raise InputError("plan.priors: an entry is not a length prior: give one that a run wrote")

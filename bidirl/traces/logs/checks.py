"""What a table of keys cannot say: repairs and doubts, each named by what it does and why."""

from collections.abc import Callable

import numpy as np

from bidirl.traces.logs.bounds import within_bounds
from bidirl.traces.logs.table import Column, Findings
from bidirl.traces.step_log import Mode

__all__ = [
    "buffered_without_rate",
    "colocated_if",
    "dp_ranks",
    "gpus_from_rate",
    "gpus_from_two_rates",
    "idle_recomputed",
    "nested_outside",
    "parts_of",
    "plausible",
    "ratios_within_one",
    "tokens_from_group_rate",
    "tokens_from_rates",
    "update_from_train",
    "waits_not_negative",
]

STAGES = ("old_logprob_s", "reference_s", "values_s", "update_s", "weight_sync_s", "switch_s")
SMALL_STAGES = ("reward_s", "advantage_s", "data_s", "training_prep_s", "logprob_prep_s")

UNEXPLAINED_SHARE = 0.10
"""Share of a step that no timer explains from which on it is said; smaller ones are logging and glue."""

PARTS_EXCEED = 1.02
"""Parts may exceed the whole by rounding, not by more: beyond that they overlap or are other means."""

BUFFERED = 4.0
"""A step that is so many times faster than the median, at a rate as many times higher, took a batch that lay
ready: its rate is none of the rollouters."""

MAX_DECODE_TOKENS_PER_S = 400.0
"""Tokens that one response can gain in a second: small models on fast GPUs reach 300 alone in a batch."""

MAX_RANKS = 64
"""Data-parallel ranks tried: beyond them three decimals no longer tell whole numbers apart."""


def _count(values: Column) -> int:
    return int(np.isfinite(values).sum())


def _rows(findings: Findings) -> int:
    return next((len(column) for column in findings.columns.values()), 0)


def _get(findings: Findings, name: str) -> Column:
    found = findings.columns.get(name)
    return np.full(_rows(findings), np.nan) if found is None else found


def _raw(findings: Findings, *names: str) -> Column:
    value = np.full(_rows(findings), np.nan)
    for name in reversed(names):
        if name in findings.raw:
            value = np.where(np.isnan(findings.raw[name]), value, findings.raw[name])
    return value


def parts_of(findings: Findings) -> Column:
    """Return the seconds of a step that timers explain, each counted once; NaN without two of them.

    The wait stands for generation where both are known: it is the part of generation that is exposed.
    """
    wait, generation = _get(findings, "wait_s"), _get(findings, "generation_s")
    exposed = np.where(np.isnan(wait), generation, wait)
    stages = np.array([exposed, *(_get(findings, name) for name in STAGES)])
    small = np.array([_get(findings, name) for name in SMALL_STAGES])
    total = np.nansum(stages, axis=0) + np.nansum(small, axis=0)
    return np.where(np.isfinite(stages).sum(axis=0) >= 2, total, np.nan)


def nested_outside(findings: Findings) -> None:
    """Undo the subtraction of validation and checkpoints in rows whose step timer cannot contain them."""
    step = findings.columns.get("step_s")
    testing, saving = _get(findings, "testing_s"), _get(findings, "checkpoint_s")
    parts = parts_of(findings)
    if step is None or not _count(step):
        if _count(parts):
            findings.notes.append(
                f"no step timer: the stages sum to {np.nanmedian(parts):.1f} s a step (median), "
                "step_s is left out"
            )
        return
    testing, saving = np.nan_to_num(testing), np.nan_to_num(saving)
    outside = (parts > step * PARTS_EXCEED + 0.1) & (testing + saving > 0)
    whole = step + testing + saving
    fits = outside & (parts <= whole * PARTS_EXCEED + 0.1)
    if fits.any():
        findings.columns["step_s"] = np.where(fits, whole, step)
        findings.notes.append(
            f"{fits.sum()} steps: the step timer is too short to contain testing and checkpoints; "
            "nothing is subtracted there"
        )
    elif (testing + saving > 0).any():
        findings.notes.append("step_s is the step timer without testing and checkpoints, which ran inside it")


def tokens_from_rates(findings: Findings) -> None:
    """Derive token counts from verl's ``timing_per_token_ms`` where they are not logged."""
    total = _get(findings, "total_tokens")
    if not _count(total):
        derived = _get(findings, "update_actor_s") * 1e3 / _raw(findings, "timing_per_token_ms/update_actor")
        other = _get(findings, "reference_s") * 1e3 / _raw(findings, "timing_per_token_ms/ref")
        derived = np.asarray(np.round(np.where(np.isnan(derived), other, derived)), dtype=np.float64)
        if _count(derived):
            findings.columns["total_tokens"] = derived
            findings.notes.append("total_tokens is derived: seconds of update_actor / its time per token")
    generation = _raw(findings, "timing_s/gen", "timing/gen")
    generated = np.round(generation * 1e3 / _raw(findings, "timing_per_token_ms/gen"))
    if _count(generated):
        findings.columns["response_total_tokens"] = generated


def dp_ranks(findings: Findings) -> None:
    """Infer ranks and batch from ``global_seqlen``: token sums of one data-parallel rank, not lengths."""
    per_rank = _get(findings, "tokens_per_rank_mean")
    lengths = _get(findings, "response_mean_tokens") + _get(findings, "prompt_mean_tokens")
    total = _get(findings, "total_tokens")
    sizes = total / lengths
    if _count(sizes) and abs(np.nanmedian(sizes) - round(np.nanmedian(sizes))) < 0.02:
        findings.facts["batch_samples"] = float(round(np.nanmedian(sizes)))
    if not _count(per_rank):
        return
    findings.notes.append(
        "global_seqlen is the token sum of one data-parallel rank, not a sequence length: tokens_per_rank_*"
    )
    known = np.isfinite(per_rank) & np.isfinite(lengths)
    if _count(total):
        ranks = np.nanmedian(total / per_rank)
        if abs(ranks - round(ranks)) < 0.01:
            findings.facts["num_dp_ranks"] = float(round(ranks))
    elif known.any():
        low, high = _get(findings, "tokens_per_rank_min"), _get(findings, "tokens_per_rank_max")
        _search_ranks(findings, per_rank[known], lengths[known], low[known], high[known])


def _search_ranks(findings: Findings, per_rank: Column, lengths: Column, low: Column, high: Column) -> None:
    """Find the ranks for which the tokens and the batch are whole numbers in every row."""
    able = []
    for ranks in range(1, MAX_RANKS + 1):
        tokens, batch = per_rank * ranks, per_rank * ranks / lengths
        # All are printed to three decimals at best: what is left of a whole number grows with the factor.
        are_whole = np.abs(tokens - np.round(tokens)) <= 1e-3 * ranks + 1e-6
        are_batches = np.abs(batch - np.round(batch)) <= 0.02 + batch * 2e-6
        rest = tokens - low - high  # token sums of the ranks between the smallest and the largest
        fits = (rest >= (ranks - 2) * low - 1) & (rest <= (ranks - 2) * high + 1) | np.isnan(rest)
        if ranks == 1:
            fits = (high - low < 1) | np.isnan(rest)
        if (are_whole & are_batches & fits).all():
            able.append((ranks, round(float(np.median(batch)))))
    powers = [pair for pair in able if pair[0] & (pair[0] - 1) == 0] or able
    if not powers:
        return
    listed = ", ".join(f"{ranks} ranks = {batch} samples" for ranks, batch in powers[:4])
    findings.notes.append(f"ranks and batch that make the token sums whole numbers: {listed}, ...")
    findings.facts["min_dp_ranks"], findings.facts["min_batch_samples"] = map(float, powers[0])


def gpus_from_rate(findings: Findings) -> None:
    """Infer the GPUs from tokens, time and the rate per GPU, if all rows agree on a whole number."""
    raw_step = _raw(findings, "perf/time_per_step", "timing_s/step", "timing/step")
    with np.errstate(divide="ignore", invalid="ignore"):
        gpus = _raw(findings, "perf/total_num_tokens") / (raw_step * _raw(findings, "perf/throughput"))
    known = np.isfinite(gpus)
    if not known.any():
        return
    found = round(float(np.median(gpus[known])))
    agrees = np.abs(gpus - found) < 0.02 * found
    if found >= 1 and 2 * agrees.sum() > known.sum():
        findings.facts["num_gpus"] = float(found)
        odd = known & ~agrees
        if odd.any():
            rates = findings.columns["tokens_per_s_per_gpu"]
            findings.columns["tokens_per_s_per_gpu"] = np.where(odd, np.nan, rates)
            findings.notes.append(
                f"perf/throughput of {odd.sum()} steps does not fit tokens, time and {found} GPUs: "
                "left out there"
            )
    else:
        findings.notes.append(
            "perf/throughput fits no whole number of GPUs with tokens and time: the rate is as logged"
        )


def ratios_within_one(findings: Findings) -> None:
    """Reject an MFU above 1: its peak FLOPS are wrong (verl#1208)."""
    for name in ("mfu",):
        column = findings.columns.get(name)
        if column is not None and (column > 1).any():
            worst = np.nanmax(column)
            findings.columns[name] = np.where(column > 1, np.nan, column)
            findings.notes.append(
                f"{name} of {worst:.3f} exceeds 1 and is rejected: the framework's peak FLOPS are wrong here"
            )


def colocated_if(*keys: str) -> Callable[[Findings], None]:
    """Return a check that calls a run colocated when it logs one of these keys."""

    def check(findings: Findings) -> None:
        if any(key in findings.raw and _count(findings.raw[key]) for key in keys):
            findings.mode = Mode.COLOCATED
            findings.notes.append("colocated: wait_s is the rollout itself, as the trainer sees it")

    return check


def update_from_train(findings: Findings) -> None:
    """Take the update from slime's training timer, without the log-probabilities nested in it."""
    update, train = _get(findings, "update_s"), _get(findings, "train_s")
    nested = np.nan_to_num(_get(findings, "old_logprob_s")) + np.nan_to_num(_get(findings, "reference_s"))
    derived = np.where(np.isnan(update), train - nested, update)
    if _count(derived):
        findings.columns["update_s"] = derived


def waits_not_negative(findings: Findings) -> None:
    """Drop a wait that its nested timers exceed: they did not all run inside it."""
    wait = findings.columns.get("wait_s")
    if wait is not None and (wait < 0).any():
        findings.columns["wait_s"] = np.where(wait < -0.01, np.nan, np.maximum(wait, 0))
        if (wait < -0.01).any():
            findings.notes.append(
                "timers nested in the wait exceed it in some steps: wait_s is left out there"
            )


def idle_recomputed(findings: Findings) -> None:
    """Compute the trainer's idle share from exposed generation, as the printed one is inverted (NeMo-RL)."""
    wait = _get(findings, "wait_s")
    busy = np.array([_get(findings, name) for name in ("update_s", "old_logprob_s", "weight_sync_s")])
    total = wait + np.nansum(busy, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = wait / total
    if _count(share):
        findings.columns["trainer_wait_share"] = np.where(np.isfinite(busy).any(axis=0), share, np.nan)


def gpus_from_two_rates(findings: Findings) -> None:
    """Infer the GPUs from one rate in total and per GPU."""
    ratio = _get(findings, "e2e_tokens_per_s") / _get(findings, "tokens_per_s_per_gpu")
    if _count(ratio):
        found = round(float(np.nanmedian(ratio)))
        if found >= 1 and np.nanmax(np.abs(ratio - found)) < 0.02 * found:
            findings.facts["num_gpus"] = float(found)


def tokens_from_group_rate(findings: Findings) -> None:
    """Derive a step's tokens from the rate of the whole job and the step's time."""
    raw_step = _raw(findings, "• Total step time", "timing/train/total_step_time")
    tokens = np.round(_get(findings, "e2e_tokens_per_s") * raw_step)
    if _count(tokens) and not _count(_get(findings, "total_tokens")):
        findings.columns["total_tokens"] = tokens
        findings.notes.append(
            "total_tokens is derived: tokens/s of the job x step time, good to its two decimals"
        )


def buffered_without_rate(findings: Findings) -> None:
    """Take the rate from steps whose batch lay ready: consumed samples over a wait are no production."""
    rate, time = _get(findings, "tokens_per_s"), _get(findings, "orchestrator_s")
    known = np.isfinite(rate) & np.isfinite(time) & (time > 0)
    if not known.any():
        return
    # Typical is the slower half: with few steps the buffered ones would move the median itself.
    typical_s = np.median(time[known & (time >= np.median(time[known]))])
    typical_rate = np.median(rate[known & (rate <= np.median(rate[known]))])
    buffered = known & (time * BUFFERED < typical_s) & (rate > BUFFERED * typical_rate)
    buffered |= known & (_get(findings, "sample_mean_tokens") > MAX_DECODE_TOKENS_PER_S * time)
    if buffered.any():
        findings.columns["tokens_per_s"] = np.where(buffered, np.nan, rate)
        steps = _get(findings, "step")[buffered]
        listed = ", ".join(f"{step:g}" for step in steps[:5])
        findings.notes.append(f"batch of step {listed} lay ready in a buffer: no rate from it")


def plausible(findings: Findings) -> None:
    """Check what holds for every framework: signs, shares, order of lengths, parts against the whole."""
    kept, notes = within_bounds(findings.columns)
    findings.columns.update(kept)
    findings.notes += notes
    mean = _get(findings, "response_mean_tokens")
    wrong = (mean > _get(findings, "response_max_tokens") * 1.001) | (
        mean < _get(findings, "response_min_tokens") * 0.999
    )
    if wrong.any():
        findings.notes.append(f"{wrong.sum()} steps: the mean response lies outside of its own min and max")
    _unexplained(findings)


def _unexplained(findings: Findings) -> None:
    step, parts = _get(findings, "step_s"), parts_of(findings)
    both = np.isfinite(step) & np.isfinite(parts) & (step > 0)
    if not both.any():
        return
    rest = float(np.median(step[both] - parts[both]))
    share = float(np.median((step[both] - parts[both]) / step[both]))
    findings.facts["unexplained_share"] = round(share, 4)
    if share > UNEXPLAINED_SHARE:
        findings.notes.append(f"{rest:.1f} s of a step ({share:.0%}, median) are explained by no timer")
    over = both & (parts > step * PARTS_EXCEED + 0.05)
    if over.any():
        most = float(np.max(parts[over] - step[over]))
        findings.notes.append(
            f"{over.sum()} steps: the parts exceed the step by up to {most:.1f} s: timers overlap, or are "
            "means over another window"
        )

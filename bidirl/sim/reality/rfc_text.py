"""What the table of the public re-implementation shows and does not show (markdown)."""

from typing import Any

__all__ = ["ARMS_TEXT", "EXTRA_ARMS", "INTRO", "SHARES_TEXT"]

INTRO = """\
The source prints nine rates and little else: no hardware, no lengths, no seconds. Six numbers are therefore
free. Four are drawn (lengths, their spread, the sync, and how far a rollouter's time is fixed or grows with
its samples); the speeds of rollout and trainer are then solved from two rows, no_borrow at s = 0 and s = 4.
The other seven rows are never fitted. Each draw has up to two solutions: at s = 4 either the trainer limits
the run or rollout does, and these two rows cannot tell which. The bands over all sets are predictions; the
two single sets were chosen by the other rows, as noted, and are not.

**Admission.** no_borrow at s = 1 ran 22 % below s = 4. With the counting rule, in either regime, one batch
of run-ahead gives at least {kept} of what four give, for every set; the measured step appears only where
groups that wait for the trainer are counted twice, as in verl#7938 and #7940, whose fix is younger than the
version used (veRL 0.8.0). A budget renewed at each sync is the counting rule here, to the last digit, since
nothing is dropped. So we believe double counting.

**Regime.** The rows do not settle it. We believe {regime}, {rule}, switch costs x {costs}:
all rows within {worst}. For it: (a) every {other} set has a row that misses by {other_least} or more;
(b) opportunistic borrowing gained nothing at s = 4, where {other} sets say {other_gain} and more; (c) BiDiRL
led opportunistic by about 10 % at every s, and of {sets} combinations of set, rule and costs a lead of 5 to
16 % at every s is the shape of {steady};
(d) in the paper's own ablation leaving out R-on-T costs at most 1.24x, here {without} at
s = 0, against {other_without} under the best {other} set. Against it: that set, at the paper's switch costs,
has no_borrow at s = 1 and all BiDiRL rows within {other_well}, with opportunistic off by {other_idle}.
One printed number would decide: the trainer's idle share, or seconds by stage, at s = 4.

**Left unexplained.** Under trainer-bound sets with double counting and the paper's switch costs BiDiRL comes
out {low} too low over all s: lending gained more than those costs allow in our model. Cheaper switches
(another model or device) explain a part. The opportunistic arm is ours in one respect: it halves the work
between the pools whatever their sizes. With a split by capacity and no gate its rows equal BiDiRL's or nearly
so (below), because the gate rarely refuses here; the source does not say what its arm does."""

SHARES_TEXT = """\
Shares of the fitting sets that a column excludes, because one of its rows is off by more than {excludes}:"""

ARMS_TEXT = """\
Arms without a published row, tokens/s, under the set we believe and the best {other} set:"""

EXTRA_ARMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("bidirl_length_aware", "bidirl_length_aware", {}),
    ("bidirl without T-on-R", "rollout_on_train", {}),
    ("bidirl without R-on-T", "train_on_rollout", {}),
    ("opportunistic, split by capacity", "opportunistic", {"split": "eq6"}),
)
"""(name, preset, choices) of arms that are simulated beside the published ones."""

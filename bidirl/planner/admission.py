"""How far generation may run ahead of training: the staleness bound as a counting rule.

Source: design.md section 5. ``s`` is an exact decimal and everything is computed in integers: with floats,
``(3 + 1 + 0.1) * 60`` falls below 246 and a group would be refused.
"""

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

__all__ = ["Admission"]


@dataclass(frozen=True, slots=True)
class Admission:
    """The rule ``issued - refunded < A(v)`` with ``A(v) = floor((v + 1 + s) * B)``."""

    groups_per_step: int
    """``B``."""
    numerator: int
    """``p`` of ``s = p / q``."""
    denominator: int
    """``q`` of ``s = p / q``."""

    @staticmethod
    def of(groups_per_step: int, staleness: Decimal) -> "Admission":
        """Return the rule of a staleness bound >= 0."""
        ratio = Fraction(staleness)
        return Admission(groups_per_step, ratio.numerator, ratio.denominator)

    def limit(self, version: int) -> int:
        """Return ``A(version)``, the number of groups that may have been started (less refunds)."""
        q = self.denominator
        return ((version + 1) * q + self.numerator) * self.groups_per_step // q

    def pinned_version(self, group: int) -> int:
        """Return the version that generates a group in pinned mode: ``min{v >= 0 : group < A(v)}``."""
        q, b = self.denominator, self.groups_per_step
        # group < floor(x) means group + 1 <= x, that is (v + 1) * q * b + p * b >= (group + 1) * q
        need = (group + 1) * q - self.numerator * b
        return max(0, -(-need // (q * b)) - 1)

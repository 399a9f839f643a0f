"""Foresight: simulate both branches of a lending decision with the true lengths, and keep the better.

A bound on what any gate could know, not a policy to run: it copies the whole simulation twice at each
decision.
"""

import copy
from math import inf

from bidirl.planner.gatekeeper import Proposal
from bidirl.planner.gates import Forecast
from bidirl.planner.policy import Gate
from bidirl.sim.driver import Driver

__all__ = ["attach_oracle", "fork"]

PUBLICATIONS = 2
"""How far a branch is followed. Source: design.md section 5, "to the second next publication"."""


def attach_oracle(driver: Driver) -> None:
    """Let a driver whose policy asks for it decide by foresight; others stay as they are."""
    if driver.plan.policy.gate is not Gate.ORACLE:
        return

    def foresee(_: Proposal) -> Forecast:
        alone_s, lent_s = (_publication_s(driver, taken=taken) for taken in (False, True))
        return Forecast(alone_s - lent_s, 0.0)

    driver.scheduler.lender.gatekeeper.foresee = foresee


def fork(driver: Driver) -> Driver:
    """Return an independent copy of a running simulation; plan, workload and drawn lengths are shared.

    May be called while the scheduler handles an event; the copy's scheduler is then in the middle of it.
    """
    gatekeeper = driver.scheduler.lender.gatekeeper
    memo: dict[int, object] = {id(thing): thing for thing in (driver.plan, driver.workload)}
    memo[id(driver.sink)] = None
    memo[id(gatekeeper.foresee)] = None
    memo[id(driver.blocks)] = dict(driver.blocks)
    for replica in driver.replicas:
        memo[id(replica)] = replica.twin()
    record = driver.recorder.record
    for table in (record.samples, record.spans, record.steps, record.leases):
        for name in table.__slots__:
            column = getattr(table, name)
            if not isinstance(column, dict):  # further columns, of real runs only
                memo[id(column)] = column[:]
    twin = copy.deepcopy(driver, memo)
    twin.adopt()
    return twin


def _publication_s(driver: Driver, *, taken: bool) -> float:
    """Return when the second next version is published if the lease is (not) taken now."""
    twin = fork(driver)
    scheduler = twin.scheduler
    scheduler.lender.gatekeeper.force(taken=taken)
    published = twin.recorder.record.steps.published_s
    until = min(len(published) + PUBLICATIONS, twin.plan.num_steps)
    twin.carry_out(scheduler.resume())
    while len(published) < until and not scheduler.done:
        if not twin.env.pending():
            return inf
        twin.env.step()
    return published[until - 1] if len(published) >= until else twin.env.now
